"""The session with which servers are asked, in one thread: bounded where requests is not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socket import SHUT_RDWR
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from kdtrain.errors import UsageError, printable


class Session(requests.Session):
    """A session that reads no body by itself, and whose requests can be ended from outside."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Any] = []
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter(self._made))

    def get_redirect_target(self, resp: requests.Response) -> None:
        """None. Given a target, requests reads the redirect's whole body, of any size, even if it does not follow."""

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Shut the sockets where the block takes longer: its request then fails.

        A time-out of requests begins anew at each byte, and so does not bound the headers.
        """
        done = threading.Event()

        def watch() -> None:
            wait = seconds
            while not done.wait(wait):
                wait = 1.0  # a connection may be made later still
                for connection in self._made:
                    with suppress(OSError, AttributeError):  # it is not open
                        connection.sock.shutdown(SHUT_RDWR)

        threading.Thread(target=watch, daemon=True, name="deadline").start()
        try:
            yield
        finally:
            done.set()


class _Adapter(HTTPAdapter):
    """Notes the connections that are made."""

    def __init__(self, made: list[Any]) -> None:
        super().__init__()
        self._made = made

    def get_connection_with_tls_context(self, *args: Any, **options: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **options)
        if "ConnectionCls" not in vars(pool):
            kind = pool.ConnectionCls

            def make(*args: Any, **options: Any) -> Any:
                self._made.append(kind(*args, **options))
                return self._made[-1]

            pool.ConnectionCls = make
        return pool

    def cert_verify(self, *args: Any, **options: Any) -> None:
        try:
            super().cert_verify(*args, **options)
        except OSError as error:
            raise UsageError(f"{printable(str(error))}; set REQUESTS_CA_BUNDLE to a file of certificates") from None
