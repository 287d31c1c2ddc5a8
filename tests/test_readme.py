"""What the README shows is what works."""

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax import config as C
from rlvr_jax import strategies
from rlvr_jax.strategies.mix import build_mixer
from rlvr_jax.types import Signals

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_strategy_in_ten_lines(tmp_path, monkeypatch):
    source = next(b for b in blocks("python") if "shortest_half" in b and "def apply" in b)
    assert len(source.strip().splitlines()) <= 11
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    length = jnp.array([[1, 2, 3, 4], [5, 5, 5, 90]])
    mask = jnp.arange(90) < length[..., None]
    s = Signals.create(jnp.zeros((2, 4)), jnp.zeros((2, 4)), jnp.zeros((2, 4, 90)), mask, length, jnp.zeros(2, jnp.int32), jnp.int32(0))
    chosen = strategies.build(["mine:shortest_half"])
    weights, _ = chosen.apply(chosen.init(), s)
    np.testing.assert_array_equal(np.asarray(weights) > 0, [[True, True, False, False], [True, True, True, False]])


@pytest.mark.parametrize("line", re.findall(r"^(?:strategies|replay|rewards|model|data): .+$", "\n".join(blocks("yaml")), re.M))
def test_every_line_of_yaml_is_a_valid_config(line):
    tree = C.read_yaml(line)
    config = C.validate({**tree, "data": {"domains": {"a": {"task": "arithmetic"}, "b": {"task": "knights"}}, **tree.get("data", {})}})
    strategies.build(list(config.strategies))
    build_mixer(config.data.mixer.name, [1, 1], **config.data.mixer.settings())


def test_the_data_example_is_a_valid_config():
    example = next(b for b in blocks("yaml") if b.startswith("model:"))
    domain = C.validate(C.read_yaml(example)).data.domains["questions"]
    assert domain.template.format(prompt="1+1?").endswith("\\boxed{}.")


def test_the_documented_recipes_exist():
    for name in set(re.findall(r"configs/\w+\.yaml", README)):
        assert (Path(__file__).parents[1] / name).is_file(), name
