"""The size of a model from its config.json."""

from __future__ import annotations

import pytest

from hpcdecode.errors import UserError
from hpcdecode.planning.model_size import ModelSize


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1", "lfm2"])
def test_models_that_keep_states_are_refused(name, checkpoint):
    with pytest.raises(UserError, match=r"expected a model all of whose layers attend, got .* plans do not count"):
        ModelSize.from_directory(str(checkpoint(name)))
