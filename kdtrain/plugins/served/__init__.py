"""A teacher behind an inference server: who it is, what is requested, and how answers are checked (docs/vllm.md).

`--teacher-server` names the server; in a TOML of teachers/ `kind = "served"` does.
"""

from typing import Any

from kdtrain.config.choices import PLANS, TEACHERS
from kdtrain.config.values import register_section
from kdtrain.plugins.served.options import RunServerConfig, ServerConfig

register_section("server", {"distill": RunServerConfig, "cache-teacher": ServerConfig})


def served(spec: Any, device: Any, mode: str) -> Any:
    """Open the teacher on an inference server, known by its most likely entries (--teacher-server)."""
    from kdtrain.plugins.served.teacher import ServedTeacher

    return ServedTeacher(spec, device, mode)


def served_data(request: Any) -> Any:
    """Plan a run on a server's answers, cached in the run's folder while the run reads them."""
    from kdtrain.plugins.served.data_plan import ServedData

    return ServedData(request)


TEACHERS.add("served", served, served)
PLANS.add("served", served_data, served_data)
