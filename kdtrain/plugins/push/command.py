"""`kdtrain push`: all files go up before one commit names them, so that nobody ever reads half of a cache or a student.

What the hub holds already, by its SHA-256, is not sent again: an upload that broke off resumes. Sent is what the format
names and the digests vouch for, nothing else that lies in the folder.
"""

import logging
import tempfile
from pathlib import Path

from kdtrain.errors import UsageError
from kdtrain.files import refuse_links
from kdtrain.monitor.progress import setup_logging
from kdtrain.net.address import Address, parse_address
from kdtrain.plugins.push import cache
from kdtrain.plugins.push.options import PushConfig
from kdtrain.plugins.push.repository import Repository, make_repository, send
from kdtrain.tables import show

log = logging.getLogger("kdtrain")


def main(config: PushConfig) -> int:
    """Check what lies in the folder, upload it, and print where it is.

    UsageError: it is damaged, unfinished or neither cache nor student, the address is none on the hub or holds
    something else, or no permission. RunError: the hub does not answer.
    """
    setup_logging()
    address = parse_address(config.to)
    if address is None or address.repository is None or address.revision != "main":
        raise UsageError(f"{config.to}: it is no repository on the hub; give hf:ORG/NAME")
    if parse_address(config.path) is not None:
        raise UsageError(f"{config.path} is not a folder; push publishes the folder in which it was built")
    if not config.path.is_dir():
        raise UsageError(f"{config.path}: there is no such folder; name a cache, a run or an export")
    if cache.is_one(config.path):
        folder, kind, plan = config.path, "dataset", cache.plan
        config.refuse_missing()
    else:
        from kdtrain.plugins.push import model  # with torch

        folder, kind, plan = model.folder_of(config.path), "model", model.plan
        if any(config.licenses.values()):
            raise UsageError("a student's licence is kdtrain export --license; leave the licences of a cache out")
        address = Address(f"hf:{address.repository}", address.repository)
    refuse_links(folder)
    url, names = make_repository(address, kind, config.private)  # before minutes go into digests
    with tempfile.TemporaryDirectory(prefix="kdtrain-") as beside:
        upload = plan(config, folder, Repository(address, kind, names), Path(beside))
        log.info("uploading %d files of %s to %s", len(upload.files), folder, address)
        commit = send(address, kind, upload)
    result = {**upload.result, "to": str(address), "url": url, "commit": commit}
    show(f"pushed {folder}", result, config.json)
    return 0
