"""An empty path is refused by its name; as a path it would be the working directory."""

from functools import partial

import pytest

from lmscale.config.convert import ConvertConfig
from lmscale.config.generate import GenerateConfig
from lmscale.config.zero_shot import ZeroShotConfig

WIKITEXT = {"run_dir": "x", "task": {"name": "wikitext103", "path": "wiki.txt"}}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("ckpt", partial(ZeroShotConfig.from_dict, WIKITEXT | {"ckpt": ""})),
        ("ckpt", partial(GenerateConfig, ckpt="", prompt="Once")),
        ("source", partial(ConvertConfig, source="", target="new")),
        ("target", partial(ConvertConfig, source="old", target="")),
    ],
)
def test_an_empty_path_is_refused(name, make) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be a path, but is ''"):
        make()
