"""The names of the tensors of GGUF files, by architecture."""

from __future__ import annotations

from typing import Any

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.dense_tables import DENSE_TABLES
from hpcdecode.model.frontend.gguf.header import GgufHeader
from hpcdecode.model.frontend.gguf.hybrid_tables import HYBRID_TABLES
from hpcdecode.model.frontend.gguf.names import NameTable

TABLES = DENSE_TABLES | HYBRID_TABLES


def table_of(header: GgufHeader) -> tuple[str, NameTable]:
    """Return the architecture of a model, and the names of its modules.

    Args:
        header: Header of its first file.

    Raises:
        UserError: If the architecture is not known.
    """
    architecture = header.values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in TABLES:
        raise UserError(
            f"{header.file}: expected a GGUF file of one of the architectures {', '.join(TABLES)}, got "
            f"{architecture!r:.100}; give the model's directory in Hugging Face format"
        )
    return architecture, TABLES[architecture]


def own_values(header: GgufHeader, architecture: str) -> dict[str, Any]:
    """Return the metadata of the architecture, without its prefix."""
    prefix = f"{architecture}."
    return {key.removeprefix(prefix): v for key, v in header.values.items() if key.startswith(prefix)}
