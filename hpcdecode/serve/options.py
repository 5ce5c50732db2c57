"""What `hpcdecode serve` is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcdecode.config import EngineOptions
from hpcdecode.errors import UserError

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_CHOICES = 2048  # of a request: its prompts times their samples


class ServeOptions(EngineOptions, frozen=True, kw_only=True):
    """Options of the engine, and of the server.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        api_keys: Keys, of which requests must have one; none lets everyone in.
        served_model_name: Names under which requests may ask for the model, beside those of its directory.
        ssl_certfile: File of a certificate, for HTTPS.
        ssl_keyfile: File of its key.
        max_waiting: Rows that may wait; more are answered by 429.
        max_body: Bytes of a request at most.
        max_file: Bytes of a file that is uploaded at most.
        data_dir: Folder of files and batches; None for one in the cache directory.
        drain_seconds: Seconds that rows in flight have to finish, once the server is told to end.
        stall_timeout: Seconds that a rank may make no progress; 0 for any time.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    max_waiting: int = 4096
    max_body: int = 32 << 20
    max_file: int = 1 << 30
    data_dir: str | None = None
    drain_seconds: float = 60.0
    stall_timeout: float = 300.0
    schedule: str = "fifo"
    admission: str = "optimistic"
    max_gap: float | None = 0.25

    def check(self) -> Self:
        """Return self.

        Raises:
            UserError: If a value is out of range.
        """
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"--port: expected a number in [0, 65535], got {self.port}", everywhere=True)
        if not all(self.api_keys):
            raise UserError("--api-key: expected a key, got an empty text", everywhere=True)
        if self.ssl_keyfile and not self.ssl_certfile:
            raise UserError("--ssl-keyfile: expected --ssl-certfile beside it, got none", everywhere=True)
        for name in ("drain_seconds", "stall_timeout"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise UserError(f"--{name.replace('_', '-')}: expected seconds >= 0, got {value}", everywhere=True)
        if clash := set(self.adapters) & set(self.served_model_name):
            name = min(clash)
            raise UserError(
                f"--lora {name}=DIR: expected another name than the model's, got {name!r}, which --served-model-name "
                "has too; choose another one",
                everywhere=True,
            )
        self._require_counts("max_waiting", "max_body", "max_file")
        return super().check()
