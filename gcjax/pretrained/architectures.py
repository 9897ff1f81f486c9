"""Where every layer's projections lie in a checkpoint: tensor names, shapes and config -> `Plan`.

The effective form folds a norm's gain g into the matrix beside it: `W diag(g)` behind a pre-norm, `diag(g) W` before a
post-norm. LayerNorm folds like RMSNorm: its removal of the mean, a projection that all layers share, is ignored, as are
biases. Where a norm acts on the residual sum (BERT) its gain belongs to no single matrix. The gains of q/k norms act
per head, behind the matrix, and are ignored too.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gcjax.errors import GcjaxError, nearest, some
from gcjax.pretrained import files
from gcjax.pretrained.families import FAMILIES, NAMED, PERMUTED, QKV, UNMEASURED, Family

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


class Part(NamedTuple):
    """A piece of a matrix."""

    tensor: str  # as stored, with its prefix
    index: int | None  # entry of a packed first axis (experts [E, out, in])
    transposed: bool  # stored as [in, out]
    rows: tuple[slice, ...] | None  # of the [out, in] tensor, in order; None: all


class Gain(NamedTuple):
    """The norm gain of the effective form."""

    tensor: str
    space: str  # "input": W diag(g), behind a pre-norm; "output": diag(g) W, before a post-norm
    offset: float  # g is the stored tensor plus this


class Matrix(NamedTuple):
    """A layer's projection: its parts (several for experts) put together along `axis`."""

    projection: str
    layer: int  # as numbered in the checkpoint
    shape: tuple[int, int]  # (out, in)
    parts: tuple[Part, ...]
    axis: int
    gain: Gain | None  # None: no norm's gain belongs to it, or its place is unknown


class Heads(NamedTuple):
    """Attention heads: W_q has `query * head_dim` rows, W_k and W_v `key_value * head_dim`."""

    query: int
    key_value: int
    head_dim: int


class Plan(NamedTuple):
    """All that is to be measured of a checkpoint, and a sentence about everything that is not."""

    family: str  # a row of the table, the model type where only names were recognized, or "pattern"
    layers: tuple[int, ...]
    matrices: tuple[Matrix, ...]  # by projection, then layer; one shape a projection
    heads: Heads | None
    rotary_permuted: bool  # GGUF: rows of W_q and W_k are reordered inside each head
    notes: tuple[str, ...]
    experts: int  # 0: dense


_MOST = 4096  # experts, more than any model has: beyond, a damaged header
_NESTED = ("text_config", "llm_config", "language_config")
_HEAD_FIELDS = (("num_attention_heads", "n_head", "n_heads"), ("num_key_value_heads",), ("head_dim",))
_BLOCK_HEAD_FIELDS = ("attention.head_count", "attention.head_count_kv", "attention.key_length")

_PREFIX = re.compile(
    r"(?:(?:model|language_model|text_model|transformer|gpt_neox|bert|roberta|electra|distilbert|module|base_model)\.)*"
)
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,5})(?![^.])")  # a whole component of a name
_LAYER = re.compile(rf"(?:encoder\.)?(?:layers?|h|blk)\.({_NUMBER.pattern})\.(.+)")
_TOWER = re.compile(r"(?:^|\.)(?:vision|visual|audio|multi_modal_projector|mm_projector|embed_vision|embed_audio)[^.]*\.")


class _Place(NamedTuple):
    layer: int
    tensor: str  # what follows the layer, without ".weight", a number in it as `*`
    expert: int | None


class _Piece(NamedTuple):
    part: Part
    shape: tuple[int, int]


class _Counts(NamedTuple):
    """Query heads, key/value heads and head dimension: their fields in the config and what these say, if anything."""

    fields: tuple[str, str, str]
    values: tuple[int | None, int | None, int | None]

    def heads(self, width: int) -> Heads | None:
        query, key_value, head_dim = self.values
        return Heads(query, key_value or query, head_dim or width // query) if query else None

    def __str__(self) -> str:
        return ", ".join(f"{field}={value}" for field, value in zip(self.fields, self.values) if value)


def plan(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], format: str = "safetensors") -> Plan:
    """What a checkpoint holds, from its tensors' `shapes` and its `config`.

    `config` is config.json, or GGUF's metadata with `format` "gguf", and may be empty. Shapes are the tensors'; head
    counts are the config's, needed only where q, k and v are fused. Counts that fit a fused tensor are believed: no shape
    tells 8 interleaved heads from 4 of twice the size.

    Raises `GcjaxError` for head counts that do not fit, for two tensors that are the same layer's projection, for
    shapes that are no matrix's, and when no stack is found.
    """
    if format not in FAMILIES:
        raise GcjaxError(f"format {format!r} does not exist; {nearest(format, FAMILIES)}")
    settings = dict(config)
    for key in _NESTED:
        settings.update(config[key] if isinstance(config.get(key), Mapping) else {})
    kind = settings.get("general.architecture" if format == "gguf" else "model_type")
    counts, notes = _counts(settings, kind, format), []
    text = {name: tuple(shape) for name, shape in shapes.items() if not _TOWER.search(name)}
    if len(text) < len(shapes):
        notes.append(f"{len(shapes) - len(text)} tensors of vision and audio towers are left out")
    places = {name: place for name in text if (place := _place(name))}
    depth = _positive(settings.get("num_hidden_layers"))
    if settings.get("num_nextn_predict_layers") and depth and any(place.layer >= depth for place in places.values()):
        places = {name: place for name, place in places.items() if place.layer < depth}
        notes.append(f"layers from {depth} on predict further tokens and are left out")

    family = _family(FAMILIES[format], kind, {place.tensor for place in places.values()})
    if family is None:
        return _by_pattern(text, kind, notes)
    listed = kind in family.types
    norms = family.norms if listed or kind is None else {}
    if kind is None:
        notes.append(f"the config names no model type: taken for {family.name} by tensor names, norm gains included")
    elif not listed:
        notes.append(f"model type {kind!r} is not in the table: matrices are taken by name, norm gains are not")

    found: dict[tuple[str, int], dict[int | None, _Piece]] = defaultdict(dict)
    gains: dict[tuple[str, int], Gain] = {}
    unused: set[str] = set()
    for name, place in places.items():
        shape, projections = text[name], family.matrices.get(place.tensor, ())
        packed = "exp" in place.tensor and "*" not in place.tensor
        if packed and not listed and format == "safetensors":
            projections = ()  # which way round they lie depends on the type, except in GGUF
        if projections and (len(shape) != 2 + packed or 0 in shape or (packed and shape[0] > _MOST)):
            raise GcjaxError(f"{name} has shape {shape}, but should be {'[experts, out, in]' if packed else 'a matrix'}")
        for projection, piece in _pieces(name, shape, projections, family, counts) if projections else ():
            _claim(found[projection, place.layer], piece, projection, place)
        for projection in norms.get(place.tensor, ()):
            space = "output" if projection in ("o", "down") else "input"
            gains[projection, place.layer] = Gain(name, space, family.offset)
        if not projections and len(shape) in (2, 3) and not place.tensor.endswith(("bias", "_scale", "_scale_inv")):
            unused.add(place.tensor)
    if not found:
        return _by_pattern(text, kind, notes)

    matrices: list[Matrix] = []
    for projection in PROJECTIONS:
        layers = sorted(layer for p, layer in found if p == projection)
        stack = _one_shape([_matrix(projection, layer, found[projection, layer]) for layer in layers], notes)
        stack = [m._replace(gain=_fitting(gains.get((projection, m.layer)), m, text)) for m in stack]
        bare = [m.layer for m in stack if m.gain is None]
        if bare and any(projection in targets for targets in norms.values()):
            notes.append(f"{projection} has no norm gain that fits in {_layers(bare)}")
        matrices += stack
    experts = max(len(pieces) if None not in (pieces := found[m.projection, m.layer]) else 0 for m in matrices)
    if experts:
        notes.append(f"the {experts} experts of a layer are concatenated: gate and up by rows, down by columns")
    for role, names in itertools.groupby(sorted(unused, key=lambda name: (_role(name), name)), key=_role):
        notes.append(f"not measured: {role} ({some(names, 8)})")
    heads = _fitting_heads(matrices, counts, notes)
    permuted = format == "gguf" and kind in PERMUTED
    return _plan(family.name if listed or kind is None else str(kind), matrices, notes, heads, permuted, experts)


def assemble(matrix: Matrix, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """`W[out, in]` of a plan's matrix, float32 and contiguous; `read` gives a whole tensor and is asked for each once.

    A matrix that is one whole tensor is not copied unless it has another type or order.
    """
    if len(matrix.parts) == 1 and matrix.parts[0][1:] == (None, False, None):
        return np.ascontiguousarray(read(matrix.parts[0].tensor), np.float32)
    w_OI, at, name, tensor = files.aligned(matrix.shape, np.float32), 0, "", np.empty(0)
    joined = w_OI if matrix.axis == 0 else w_OI.T  # a view in which parts follow each other along the first axis
    for part in matrix.parts:
        if part.tensor != name:
            name, tensor = part.tensor, np.asarray(read(part.tensor))
        part_OI = tensor if part.index is None else tensor[part.index]
        part_OI = part_OI.T if part.transposed else part_OI
        for rows in part.rows or (slice(None),):
            piece = part_OI[rows] if matrix.axis == 0 else part_OI[rows].T
            joined[at : at + len(piece)] = piece
            at += len(piece)
    return w_OI


def whole(matrix: Matrix, checkpoint: files.Checkpoint) -> np.ndarray:
    """`assemble` from an open checkpoint, without reading the rest of a fused tensor."""
    match matrix.parts:
        case [Part(tensor, None, False, (rows,))]:
            return np.ascontiguousarray(checkpoint.tensors[tensor].read(rows), np.float32)
    return assemble(matrix, lambda name: checkpoint.tensors[name].read())


def _bare(name: str) -> str:
    return _PREFIX.sub("", name.replace("_orig_mod.", ""), count=1)


def _place(name: str) -> _Place | None:
    if not (match := _LAYER.fullmatch(_bare(name))):
        return None
    numbers = _NUMBER.findall(match[2])
    expert = int(numbers[0]) if len(numbers) == 1 else None
    return _Place(int(match[1]), _NUMBER.sub("*", match[2]).removesuffix(".weight"), expert)


def _family(table: Iterable[Family], kind: object, tensors: set[str]) -> Family | None:
    """The row for the type `kind`; else the one that names suggest, if any."""
    rows = [family for family in table if kind in family.types]
    if not rows and kind is None:
        rows = [family for family in table if family.norms.keys() <= tensors]
    elif not rows:
        rows = [family for family in table if family.matrices in NAMED]
    rows = [family for family in rows if family.matrices.keys() & tensors]
    return max(rows, key=lambda row: (len(row.matrices.keys() & tensors), len(row.norms)), default=None)


def _counts(settings: Mapping[str, Any], kind: object, format: str) -> _Counts:
    fields = _HEAD_FIELDS if format == "safetensors" else [(f"{kind}.{field}",) for field in _BLOCK_HEAD_FIELDS]
    query, key_value, head_dim = (next((f for f in names if f in settings), names[0]) for names in fields)
    values = [_positive(settings.get(field)) for field in (query, key_value, head_dim)]
    return _Counts((query, key_value, head_dim), (values[0], values[1], values[2]))


def _positive(value: Any) -> int | None:
    """A count, also when given for each layer (GGUF) and the same in all of them."""
    if isinstance(value, (list, tuple, np.ndarray)):
        counts = {_positive(item) for item in value}
        return counts.pop() if len(counts) == 1 else None
    return int(value) if isinstance(value, (int, np.integer)) and value > 0 else None


def _pieces(
    name: str, shape: tuple[int, ...], projections: tuple[str, ...], family: Family, counts: _Counts
) -> Iterator[tuple[str, _Piece]]:
    """What a tensor holds of each projection, expert by expert where it is packed."""
    out, into = shape[-2:][::-1] if family.transposed else shape[-2:]
    split = _split(name, projections, out, into, family.interleaved, counts) if len(projections) > 1 else [None]
    for projection, rows in zip(projections, split):
        height = sum(piece.stop - piece.start for piece in rows) if rows else out
        for index in range(shape[0]) if len(shape) == 3 else (None,):
            yield projection, _Piece(Part(name, index, family.transposed, rows), (height, into))


def _split(
    name: str, projections: tuple[str, ...], out: int, into: int, interleaved: bool, counts: _Counts
) -> list[tuple[slice, ...]]:
    """The rows of each projection in a fused tensor of `out` rows."""
    sizes, repeats, cause = [out // len(projections)] * len(projections), 1, "an odd number"
    if projections == QKV and (interleaved or counts.values[0] or out != 3 * into):
        if (heads := counts.heads(into)) is None:
            raise GcjaxError(f"{name} holds q, k and v, but the config has no usable {counts.fields[0]} to split it by")
        key_value, repeats = (heads.query, heads.query) if interleaved else (heads.key_value, 1)
        sizes = [heads.head_dim * n for n in (heads.query, key_value, key_value)]
        cause = f"where {counts} of the config make {sum(sizes)}"
    if sum(sizes) != out:
        raise GcjaxError(f"{name} has {out} rows, {cause}")
    bounds = [0, *itertools.accumulate(size // repeats for size in sizes)]
    starts = range(0, out, bounds[-1])
    return [tuple(slice(at + a, at + b) for at in starts) for a, b in itertools.pairwise(bounds)]


def _claim(taken: dict[int | None, _Piece], piece: _Piece, projection: str, place: _Place) -> None:
    expert = place.expert if piece.part.index is None else piece.part.index
    if expert in taken or (taken and (expert is None or None in taken)):
        other = taken.get(expert) or next(iter(taken.values()))
        tensors = f"{other.part.tensor} and {piece.part.tensor}"
        raise GcjaxError(f"{tensors} are both {projection} of layer {place.layer}: the checkpoint must hold one of them")
    taken[expert] = piece


def _matrix(projection: str, layer: int, pieces: Mapping[int | None, _Piece]) -> Matrix:
    axis = 1 if projection == "down" else 0
    ordered = [pieces[expert] for expert in sorted(pieces, key=lambda expert: -1 if expert is None else expert)]
    if odd := [piece for piece in ordered if piece.shape[1 - axis] != ordered[0].shape[1 - axis]]:
        first, other = ordered[0].part.tensor, odd[0].part.tensor
        raise GcjaxError(f"{first} and {other} are experts of one layer, but {ordered[0].shape} and {odd[0].shape} do not join")
    total, other = sum(piece.shape[axis] for piece in ordered), ordered[0].shape[1 - axis]
    shape = (other, total) if axis else (total, other)
    return Matrix(projection, layer, shape, tuple(piece.part for piece in ordered), axis, None)


def _one_shape(matrices: list[Matrix], notes: list[str]) -> list[Matrix]:
    """The largest group of equal shape, of two equally large ones that with the first layer; a note about the rest."""
    if not matrices:
        return []
    shape = Counter(matrix.shape for matrix in matrices).most_common(1)[0][0]
    if rest := [matrix.layer for matrix in matrices if matrix.shape != shape]:
        what = f"{matrices[0].projection} is {shape} in {_layers([m.layer for m in matrices if m.shape == shape])}"
        notes.append(f"{what}; left out with another shape: {_layers(rest)}")
    return [matrix for matrix in matrices if matrix.shape == shape]


def _fitting(gain: Gain | None, matrix: Matrix, shapes: Mapping[str, tuple[int, ...]]) -> Gain | None:
    width = matrix.shape[1 if gain and gain.space == "input" else 0]
    return gain if gain and shapes[gain.tensor] == (width,) else None


def _fitting_heads(matrices: Iterable[Matrix], counts: _Counts, notes: list[str]) -> Heads | None:
    shapes = {matrix.projection: matrix.shape for matrix in matrices}
    if not ("q" in shapes and "k" in shapes):
        return None
    if (heads := counts.heads(shapes["q"][1])) is None:
        notes.append(f"the config has no usable {counts.fields[0]}: heads are unknown")
    elif (heads.query * heads.head_dim, heads.key_value * heads.head_dim) != (shapes["q"][0], shapes["k"][0]):
        notes.append(f"{counts} do not fit q {shapes['q']} and k {shapes['k']}: heads are unknown")
        return None
    return heads


def _by_pattern(shapes: Mapping[str, tuple[int, ...]], kind: object, notes: list[str]) -> Plan:
    """Stacks of tensors whose names differ in one number and whose shapes are equal, two layers at least."""
    flat = {name: shape for name, shape in shapes.items() if len(shape) == 2 and 0 not in shape and ".experts." not in name}
    keys = {
        name: [(name[: m.start()] + "*" + name[m.end() :], shape, int(m[0])) for m in _NUMBER.finditer(name)]
        for name, shape in flat.items()
    }
    members = Counter((key, shape) for found in keys.values() for key, shape, _ in found)
    stacks: dict[str, list[Matrix]] = defaultdict(list)
    for name, found in keys.items():
        # The first number that several names share: layers stand before what a layer has several of.
        for key, shape, layer in found:
            if members[key, shape] > 1:
                stacks[key].append(Matrix(key, layer, shape, (Part(name, None, False, None),), 0, None))
                break
    short = Counter(_bare(key).removesuffix(".weight") for key in stacks)
    matrices: list[Matrix] = []
    for key in sorted(stacks):
        name = _bare(key).removesuffix(".weight")
        stack = [m._replace(projection=name if short[name] == 1 else key) for m in stacks[key]]
        stack = _one_shape(sorted(stack, key=lambda m: m.layer), notes)
        matrices += stack if len(stack) > 1 else []
    if not matrices:
        raise GcjaxError(
            f"no layers were recognized among {len(shapes)} tensors ({some(sorted(shapes), 3)}): "
            "two matrices at least must have one shape and names that differ in one number"
        )
    unknown = "the config names no model type" if kind is None else f"model type {kind!r} has no names known here"
    notes.append(f"{unknown}: stacks are matrices of one shape whose names differ in one number")
    if len(flat) < sum(len(shape) == 2 for shape in shapes.values()):
        notes.append("experts are left out: their numbers mean nothing across layers")
    return _plan("pattern", matrices, notes, None, False, 0)


def _plan(family: str, matrices: list[Matrix], notes: list[str], heads: Heads | None, permuted: bool, experts: int) -> Plan:
    gaps: dict[str, list[str]] = defaultdict(list)
    for one, two in zip(matrices, matrices[1:]):
        if one.projection == two.projection and two.layer - one.layer > 1:
            gaps[f"{one.layer}-{two.layer}"].append(one.projection)
    by_projections: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for pair, projections in gaps.items():
        by_projections[tuple(projections)].append(pair)
    absent = [f"layers of {some(p, 8)} are absent: pairs {some(pairs, 8)} span a gap" for p, pairs in by_projections.items()]
    layers = tuple(sorted({matrix.layer for matrix in matrices}))
    return Plan(family, layers, tuple(matrices), heads, permuted, (*notes, *absent), experts)


def _layers(numbers: list[int]) -> str:
    return f"layer{'s' * (len(numbers) > 1)} {some(numbers, 8)}"


def _role(tensor: str) -> str:
    return next((role for pattern, role in UNMEASURED.items() if re.search(pattern, tensor)), "other tensors")
