"""One run as pure functions (init, step, chunk, snapshot), and the programs that train a pack of them side by side."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from ml_collections import FrozenConfigDict

from gcjax.geometry.continuity import measure
from gcjax.results import SOURCES
from gcjax.training import optim, sweep
from gcjax.training.problem import Problem, build

Gradients = Callable[[Any, Any], tuple[jax.Array, Any]]  # params, batch -> loss and gradient


class State(NamedTuple):
    """Everything a run carries from step to step."""

    params: Any
    opt_state: Any
    cumulative: Any  # sum of the raw gradients of the matrices, in the parameters' own layout
    key: jax.Array  # of the batches; with `step` it says which one is next
    step: jax.Array


def init(problem: Problem, tx: optax.GradientTransformation, seed: jax.Array) -> State:
    """The state before the first step. The seed fixes the initial weights and the batches, nothing else does."""
    init_key, batch_key = keys(seed)
    params = problem.init(init_key)
    cumulative = jax.tree.map(jnp.zeros_like, _matrices(problem, params))
    return State(params, tx.init(params), cumulative, batch_key, jnp.zeros((), jnp.int32))


def keys(seed: jax.Array | int) -> jax.Array:
    """The keys of a run's initial weights and of its batches."""
    return jax.random.split(jax.random.key(seed))


def _matrices(problem: Problem, params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if problem.roles[name] == "matrix"}


def step(
    problem: Problem, tx: optax.GradientTransformation, data: Any, state: State, of_batch: Gradients
) -> tuple[State, jax.Array]:
    """One optimizer step; returns the next state and the loss before it."""
    loss, grads = of_batch(state.params, problem.batch(data, state.key, state.step))
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    cumulative = jax.tree.map(jnp.add, state.cumulative, _matrices(problem, grads))
    params = optax.apply_updates(state.params, updates)
    return State(params, opt_state, cumulative, state.key, state.step + 1), loss


def gradients(problem: Problem, params: Any, batch: Any) -> tuple[jax.Array, Any]:
    """Loss and gradient of a batch, accumulated over its microbatches: their mean."""
    of_loss = jax.value_and_grad(problem.loss)
    if problem.microbatches == 1:
        return of_loss(params, batch)
    parts = jax.tree.map(lambda x: x.reshape(problem.microbatches, -1, *x.shape[1:]), batch)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of_loss(params, part)), None

    zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(of_loss, params, jax.tree.map(lambda x: x[0], parts)))
    total, _ = jax.lax.scan(add, zero, parts)
    return jax.tree.map(lambda x: x / problem.microbatches, total)


def chunk(
    problem: Problem, tx: optax.GradientTransformation, data: Any, state: State, steps: jax.Array, of_batch: Gradients
) -> tuple[State, dict[str, jax.Array]]:
    """`steps` optimizer steps (traced, so every length shares a program), with the mean and maximum of their losses."""

    def body(_: Any, carry: tuple[State, jax.Array, jax.Array]) -> tuple[State, jax.Array, jax.Array]:
        state, total, largest = carry
        state, loss = step(problem, tx, data, state, of_batch)
        return state, total + loss, jnp.maximum(largest, loss)  # maximum keeps NaN

    zero, lowest = jnp.zeros((), jnp.float32), jnp.full((), -jnp.inf, jnp.float32)
    state, total, largest = jax.lax.fori_loop(0, steps, body, (state, zero, lowest))
    return state, {"loss": total / steps, "loss_max": largest}


def snapshot(
    problem: Problem, data: Any, state: State, initial: Any, rank: int, solver: str, whole: jax.Array
) -> dict[str, Any]:
    """Everything that is measured at one moment, sources on the first axis of a matrix's measures (see gcjax.results).

    The gradient is that of the batch which the next step will use. `whole`: with the measures over the whole spectrum.
    """
    loss, grads = gradients(problem, state.params, problem.batch(data, state.key, state.step))
    weights = problem.stacks(state.params)
    sources = {
        "weight": weights,
        "update": jax.tree.map(jnp.subtract, weights, initial),
        "gradient": problem.stacks(grads),
        "cumulative_gradient": problem.stacks(state.cumulative),
    }
    measured, leading = {"batch_loss": loss, **problem.evaluate(state.params, data)}, {}
    for name in weights:
        w_SLOI = jnp.stack([sources[source][name] for source in SOURCES])
        found = jax.vmap(partial(measure, rank=rank, solver=solver, whole=whole))(w_SLOI)._asdict()
        found = {label.rpartition("_")[0]: value for label, value in found.items()}
        v_SLI, u_SLO = found.pop("leading_v"), found.pop("leading_u")
        cumulative = SOURCES.index("cumulative_gradient")
        found["transfer"] = jnp.stack([jnp.abs(jnp.sum(x[0] * x[cumulative], axis=-1)) for x in (v_SLI, u_SLO)])
        found["leading_input"], found["leading_output"] = leading[name] = v_SLI[0], u_SLO[0]
        found |= {label: found[label][SOURCES.index("weight")] for label in ("containment", "layer_overlap")}
        found["norm"] = jnp.linalg.norm(w_SLOI, axis=(-2, -1))
        measured |= {f"{name}/{label}": value for label, value in found.items()}
    for name, found in problem.activity(state.params, data, problem.stacks(grads), leading).items():
        measured |= {f"{name}/activity/{label}": value for label, value in found.items()}
    return measured


# Axes of the mesh of devices that train a pack: its runs are sharded over one; a batch, and with `executor.fsdp` the
# parameters, over the other.
RUN, DATA = "run", "data"


class Programs(NamedTuple):
    """A group's three jitted programs. Runs are the first axis of every state, traced hyperparameter and metric."""

    init: Callable[..., tuple[State, Any]]  # seeds_R, traced -> state, initial stacks
    chunk: Callable[..., tuple[State, dict[str, jax.Array]]]  # state (donated), traced, data, steps -> state, losses
    snapshot: Callable[..., dict[str, Any]]  # state, initial, traced, data, whole -> metrics
    where: Any  # the device, or the sharding over a mesh of devices, of what is not sharded
    runs: Any  # the same, of arrays with an entry a run
    width: int  # runs side by side


def programs(static: FrozenConfigDict, width: int, where: Any, fsdp: bool = False) -> Programs:
    """Compile-once programs for packs of `width` runs of one group (`gcjax.training.sweep.Pack.static`).

    `where` is a device, or the replicating sharding of a mesh with the axes RUN and DATA, `width` a multiple of the former.
    There every device takes its part of the runs and of each batch and, with `fsdp`, holds its part of the state. What is
    fetched (losses and metrics) is replicated.
    """
    mesh = getattr(where, "mesh", None)
    side_by_side, sharers = (1, 1) if mesh is None else (mesh.shape[RUN], mesh.shape[DATA])

    def parts(traced: Mapping[str, jax.Array]) -> tuple[Problem, optax.GradientTransformation]:
        config = sweep.bind(static, traced)
        problem = build(config)
        return problem, optim.build(config.optim, config.train.steps, problem.roles)

    def init_run(seed: jax.Array, traced: Any) -> tuple[State, Any]:
        problem, tx = parts(traced)
        state = init(problem, tx, seed)
        return state, problem.stacks(state.params)

    def chunk_run(state: State, traced: Any, data: Any, steps: jax.Array) -> Any:
        problem, tx = parts(traced)
        of_batch = partial(gradients, problem)
        if sharers > 1:
            # What is traced goes in as an argument: inside, a tracer of the outside belongs to another mesh.
            of_batch = partial(_shared(lambda traced: parts(traced)[0], where.mesh, held.params), traced)
        return chunk(problem, tx, data, state, steps, of_batch)

    def snapshot_run(state: State, initial: Any, traced: Any, data: Any, whole: jax.Array) -> dict[str, Any]:
        problem, _ = parts(traced)
        return snapshot(problem, data, state, initial, static.measure.rank, static.measure.solver, whole)

    def over_runs(run: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
        inner = _over_runs(run, axes, width // side_by_side)
        if side_by_side == 1:
            return inner
        # Not left to the partitioner, which computes an eigenproblem of all runs on every device.
        specs = tuple(PartitionSpec() if axis is None else PartitionSpec(RUN) for axis in axes)
        return jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(RUN), axis_names={RUN}, check_vma=False)

    init_runs = over_runs(init_run, (0, 0))
    chunk_runs = over_runs(chunk_run, (0, 0, None, None))
    if mesh is None:
        # Committed, as what a chunk returns is: else every program would be compiled once for either.
        begin = jax.jit(init_runs, out_shardings=SingleDeviceSharding(where))
        snapshot_runs = jax.jit(over_runs(snapshot_run, (0, 0, 0, None, None)))
        return Programs(begin, jax.jit(chunk_runs, donate_argnums=0), snapshot_runs, where, where, width)

    traced = {path: jnp.zeros(width) for path in sweep.traced(static)}
    like = jax.eval_shape(init_runs, jnp.zeros(width, jnp.uint32), traced)
    held, held_initial = jax.tree.map(partial(_sharding, mesh, fsdp), like)
    runs = NamedSharding(mesh, PartitionSpec(RUN))
    first = mesh.devices.flat[0]
    alone = where.is_fully_addressable and first.platform == "cpu"
    axes = (0, 0, 0, None, None)
    snapshots = (
        jax.jit(_over_runs(snapshot_run, axes, width)) if alone else jax.jit(over_runs(snapshot_run, axes), out_shardings=where)
    )

    def snapshot_runs(state: State, initial: Any, traced: Any, data: Any, whole: Any) -> dict[str, Any]:
        own = (state._replace(opt_state=()), initial, traced, data)
        # Two CPU devices of a process share the threads that an eigensolver of either waits for.
        return snapshots(*(jax.device_put(own, first) if alone else own), whole)

    return Programs(
        init=jax.jit(init_runs, out_shardings=(held, held_initial)),
        chunk=jax.jit(chunk_runs, donate_argnums=0, out_shardings=(held, where)),
        snapshot=snapshot_runs,
        where=where,
        runs=runs,
        width=width,
    )


def _sharding(mesh: Mesh | AbstractMesh, fsdp: bool, like: jax.ShapeDtypeStruct) -> NamedSharding:
    """Of a state's array: its runs over RUN; with `fsdp` its largest axis that divides (of matrices, never the layers') over
    DATA."""
    axes = sorted(range(1 if like.ndim < 4 else 2, like.ndim), key=lambda axis: -like.shape[axis])
    fitting = [axis for axis in axes if like.shape[axis] % mesh.shape[DATA] == 0] if fsdp and like.ndim > 2 else []
    return NamedSharding(mesh, PartitionSpec(RUN, *(DATA if [axis] == fitting[:1] else None for axis in range(1, like.ndim))))


def _shared(problem: Callable[[Any], Problem], mesh: Mesh, held: Any) -> Callable[[Any, Any, Any], Any]:
    """(traced, params, batch) -> what `gradients` returns, of one run by the devices of DATA: each of its part of the batch,
    and their mean, summed once a step. Parameters that they share (`held`: the shardings of all runs') are gathered before,
    their gradients scattered.

    Left to the partitioner, every microbatch would be summed, a tied embedding twice, and with shared parameters the whole
    batch's activations would travel in their place.
    """
    specs = jax.tree.map(lambda sharding: PartitionSpec(*sharding.spec[1:]), held)

    def mean(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if DATA not in spec:
            return jax.lax.pmean(x, DATA)
        return jax.lax.psum_scatter(x, DATA, scatter_dimension=spec.index(DATA), tiled=True) / mesh.shape[DATA]

    def own(traced: Any, params: Any, batch: Any) -> tuple[jax.Array, Any]:
        loss, grads = gradients(problem(traced), params, batch)
        return jax.lax.pmean(loss, DATA), jax.tree.map(mean, grads, specs)

    whole, part = PartitionSpec(), PartitionSpec(DATA)
    # In a shard_map over the runs, the mesh is that of the context.
    return jax.shard_map(
        own, mesh=mesh if mesh.shape[RUN] == 1 else None, in_specs=(whole, whole, part), out_specs=(whole, specs),
        axis_names={DATA}, check_vma=False,
    )  # fmt: skip


def _over_runs(run: Callable[..., Any], axes: tuple[int | None, ...], width: int) -> Callable[..., Any]:
    if width > 1:
        return jax.vmap(run, in_axes=axes)

    # A batch axis of 1 would still turn every matrix product into a batched one, which is slower on CPU.
    def alone(*args: Any) -> Any:
        own = [arg if axis is None else jax.tree.map(lambda x: x[0], arg) for arg, axis in zip(args, axes)]
        return jax.tree.map(lambda x: x[None], run(*own))

    return alone
