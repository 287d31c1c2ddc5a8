"""Weights of Hugging Face folders: safetensors in, straight into sharded device arrays, and out again.

No second copy of the model exists in host memory: on the way in at most one parameter's local shards are there at a
time, on the way out at most one file.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from rlvr_jax.models.decoder import DecoderConfig, Params, abstract_params, param_axes
from rlvr_jax.models.hf_config import ModelError, load_config, read_json, to_config
from rlvr_jax.models.tokenizer import Tokenizer, load_tokenizer
from rlvr_jax.sharding import shardings

__all__ = ["ModelError", "Tokenizer", "export", "load_config", "load_params", "load_tokenizer"]

# Our name -> (name below model.layers.N, stored [out, in] and so transposed).
LAYER_TENSORS = {
    "attn_norm": ("input_layernorm.weight", False),
    "wq": ("self_attn.q_proj.weight", True),
    "wk": ("self_attn.k_proj.weight", True),
    "wv": ("self_attn.v_proj.weight", True),
    "wo": ("self_attn.o_proj.weight", True),
    "bq": ("self_attn.q_proj.bias", False),
    "bk": ("self_attn.k_proj.bias", False),
    "bv": ("self_attn.v_proj.bias", False),
    "q_norm": ("self_attn.q_norm.weight", False),
    "k_norm": ("self_attn.k_norm.weight", False),
    "mlp_norm": ("post_attention_layernorm.weight", False),
    "w_gate": ("mlp.gate_proj.weight", True),
    "w_up": ("mlp.up_proj.weight", True),
    "w_down": ("mlp.down_proj.weight", True),
}
OTHER_TENSORS = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
          "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json", "LICENSE", "NOTICE")
MAX_FILE_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a folder: where it lies in our tree and how it is stored."""

    name: str
    leaf: str
    layer: int | None
    transposed: bool
    shape: tuple[int, ...]
    """As stored."""


def tensors(cfg: DecoderConfig) -> list[Tensor]:
    """All tensors of a folder of this shape, in file order."""
    tree = abstract_params(cfg)
    out = [Tensor(name, leaf, None, False, tree[leaf].shape) for leaf, name in OTHER_TENSORS.items() if leaf in tree]
    for i in range(cfg.num_layers):
        for leaf, x in tree["layers"].items():
            suffix, transposed = LAYER_TENSORS[leaf]
            shape = x.shape[1:][::-1] if transposed else x.shape[1:]
            out.append(Tensor(f"model.layers.{i}.{suffix}", leaf, i, transposed, shape))
    return out


def load_params(folder: str | Path, cfg: DecoderConfig, mesh: Mesh | None = None) -> Params:
    """float32 parameters, layers stacked, each device reading only its own slice of each tensor.

    Args:
      folder: with ``model.safetensors``, or ``model.safetensors.index.json`` and its parts.
      cfg: shape of the model.
      mesh: where the parameters go (``decoder.param_axes``); None = the first device.

    Raises:
      ModelError: a file or tensor is missing, has another shape or an unknown dtype, or is not of this architecture.
      ValueError: an axis does not divide over the mesh.
    """
    folder, tree = Path(folder), abstract_params(cfg)
    where: Any = shardings(mesh, param_axes(cfg), tree) if mesh is not None else jax.tree.map(
        lambda _: SingleDeviceSharding(jax.devices()[0]), tree)
    with _open(folder) as source:
        _check(folder, source, cfg)
        slices = {t.name: source[t.name].get_slice(t.name) for t in tensors(cfg)}

        def place(leaf: str, shape: tuple[int, ...], sharding: Any, stacked: bool) -> jax.Array:
            suffix, transposed = LAYER_TENSORS[leaf] if stacked else (OTHER_TENSORS[leaf], False)

            def read(index: Any) -> np.ndarray:
                index = tuple(slice(*s.indices(n)) for s, n in zip(index, shape))
                if not stacked:
                    return np.asarray(slices[suffix][index], np.float32)
                out = np.empty([s.stop - s.start for s in index], np.float32)
                for row, i in enumerate(range(index[0].start, index[0].stop)):
                    one = slices[f"model.layers.{i}.{suffix}"]
                    out[row] = one[index[2], index[1]].T if transposed else one[index[1:]]
                return out

            return jax.make_array_from_callback(shape, sharding, read)

        out: Params = {k: place(k, tree[k].shape, where[k], False) for k in tree if k != "layers"}
        out["layers"] = {k: place(k, x.shape, where["layers"][k], True) for k, x in tree["layers"].items()}
        return out


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[dict[str, Any]]:
    """Tensor name -> the open (memory-mapped) file that holds it."""
    from safetensors import SafetensorError, safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():  # first, as transformers does: where both lie, one is left over from another save
        files = [single.name]
    elif index.is_file():
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
            raise ModelError(f"'{index}': 'weight_map' must map names of tensors to files; save the model again")
        files = sorted(set(named.values()))
    else:
        raise ModelError(f"'{folder}': no model.safetensors and no model.safetensors.index.json; save the model as safetensors")
    with contextlib.ExitStack() as stack:
        out: dict[str, Any] = {}
        for name in files:
            try:
                f = stack.enter_context(safe_open(folder / name, framework="numpy"))
            except (OSError, SafetensorError) as e:
                raise ModelError(f"'{folder / name}' cannot be read: {e}") from None
            out |= dict.fromkeys(f.keys(), f)
        yield out


def _check(folder: Path, source: dict[str, Any], cfg: DecoderConfig) -> None:
    """Every tensor there, of the right shape and a known dtype, and none left over, before anything is read."""
    expected = tensors(cfg)
    missing = [t.name for t in expected if t.name not in source]
    if missing:
        raise ModelError(f"'{folder}': tensor '{missing[0]}' is missing ({len(missing)} of {len(expected)}); the weights do not match config.json")
    for t in expected:
        s = source[t.name].get_slice(t.name)
        if tuple(s.get_shape()) != t.shape:
            raise ModelError(f"'{folder}': tensor '{t.name}' has shape {tuple(s.get_shape())}, config.json says {t.shape}")
        if s.get_dtype() not in DTYPES:
            raise ModelError(f"'{folder}': tensor '{t.name}' has dtype {s.get_dtype()}, expected one of {', '.join(DTYPES)}")
    ignored = ("lm_head.weight",) if cfg.tie_embeddings else ()
    left = sorted(n for n in source.keys() - {t.name for t in expected} if n not in ignored and not n.endswith("rotary_emb.inv_freq"))
    if left:
        raise ModelError(f"'{folder}': tensor '{left[0]}' ({len(left)} such) has no place in this architecture; the weights do not match config.json")


def export(folder: str | Path, params: Params, cfg: DecoderConfig, *, source_folder: str | Path | None = None,
           dtype: str = "float32", max_file_bytes: int = MAX_FILE_BYTES, config_extra: dict[str, Any] | None = None) -> Path:
    """Writes a folder that ``AutoModelForCausalLM.from_pretrained`` and :func:`load_params` read.

    Written beside its place and renamed, so a killed export leaves no half folder. With several processes all call
    it, and process 0 writes.

    Args:
      folder: replaced if it holds a model already.
      params: float32, layers stacked; may be sharded.
      cfg: their shape.
      source_folder: where config.json, tokenizer, chat template and generation_config come from; None = weights and
        a config.json made from ``cfg``.
      dtype: 'float32', 'bfloat16', 'float16', or 'original': that of the source folder's config.
      max_file_bytes: weights above it are split over several files.
      config_extra: entries added to a config.json made from ``cfg``.

    Raises:
      ModelError: the folder holds something else, the source has another shape, or the dtype is unknown.
    """
    folder = Path(folder)
    check_target(folder)
    config = _source_config(Path(source_folder), cfg) if source_folder else to_config(cfg, dtype, **(config_extra or {}))
    if dtype == "original":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in DTYPES.values():
        raise ModelError(f"dtype '{dtype}' is unknown; expected one of {', '.join(DTYPES.values())} or original")
    config = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")} | {"torch_dtype": dtype}
    writer = jax.process_index() == 0
    with replacing(folder) if writer else contextlib.nullcontext(folder) as partial:
        if writer:
            write_json(partial / "config.json", config)
            for path in (Path(source_folder) / name for name in COPIED) if source_folder else ():
                if path.is_file():
                    shutil.copyfile(path, partial / path.name)
        _write_weights(partial, params, cfg, dtype, max_file_bytes, writer)
    return folder


def check_target(folder: Path) -> None:
    """Refuses to replace anything but a model folder or an empty one.

    Raises:
      ModelError: the path holds something else.
    """
    if folder.exists() and not (folder / "config.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"'{folder}' exists and holds no model; choose another folder")


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` that takes its place when the block ends without an exception."""
    partial, old = folder.parent / f".{folder.name}.partial", folder.parent / f".{folder.name}.old"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """One safetensors file, readable by others (the library makes it private)."""
    from safetensors.numpy import save_file

    save_file(arrays, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _source_config(source: Path, cfg: DecoderConfig) -> dict[str, Any]:
    seen = load_config(source)
    if seen != cfg:
        different = [f.name for f in dataclasses.fields(cfg) if getattr(seen, f.name) != getattr(cfg, f.name)]
        raise ModelError(f"'{source / 'config.json'}' describes another model: {different[0]} is {getattr(seen, different[0])!r}, "
                         f"the parameters have {getattr(cfg, different[0])!r}")
    return read_json(source / "config.json")


def _write_weights(folder: Path, params: Params, cfg: DecoderConfig, dtype: str, max_file_bytes: int, writer: bool) -> None:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    size = lambda t: int(np.prod(t.shape)) * kind.itemsize  # noqa: E731
    files: list[list[Tensor]] = [[]]
    for t in tensors(cfg):
        if files[-1] and sum(map(size, files[-1])) + size(t) > max_file_bytes:
            files.append([])
        files[-1].append(t)
    names = ["model.safetensors"] if len(files) == 1 else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for name, group in zip(names, files):
        arrays = {t.name: x for t in group if (x := _fetch(params, t, kind, writer)) is not None}
        if writer:
            write_tensors(folder / name, arrays)
    if writer and len(files) > 1:
        index = {"metadata": {"total_size": sum(size(t) for g in files for t in g)},
                 "weight_map": {t.name: name for name, g in zip(names, files) for t in g}}
        write_json(folder / "model.safetensors.index.json", index)


def _fetch(params: Params, t: Tensor, kind: np.dtype, writer: bool) -> np.ndarray | None:
    """One tensor as stored, gathered from all devices; None on processes that do not write."""
    x = params[t.leaf] if t.layer is None else params["layers"][t.leaf][t.layer]
    if not x.is_fully_addressable:
        from jax.experimental.multihost_utils import process_allgather

        x = process_allgather(x, tiled=True)
    if not writer:
        return None
    host = np.asarray(x, dtype=jnp.float32)
    return np.ascontiguousarray((host.T if t.transposed else host).astype(kind))
