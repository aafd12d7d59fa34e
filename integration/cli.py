"""The command line: ``layerplan doctor | explain | plan | compile | cache | tune | pretrain | compare | data | complete |
demo``.

Every body is imported inside its command, so that help and doctor need neither torch nor megatron. ``layerplan/__main__.py`` starts
it, and says what to install where a package is absent.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..recipes import RECIPES

app = typer.Typer(name="layerplan", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data", help="Datasets for pretraining.")
cache_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cache_app, name="cache", help="Compiled kernels: what is there, and how it gets to another machine.")

RecipeName = Annotated[str, typer.Argument(help=f"Name of a recipe: {', '.join(RECIPES)}.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Fields of the recipe, for example train.steps=200.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _fail(message: str, code: int) -> None:
    print(f"layerplan: {message}", file=sys.stderr)
    raise SystemExit(code)


def _need(*extras: str) -> None:
    """Ends the command where a package of ``extras`` is absent: before the work, not an hour into it."""
    from .engines.packages import EXTRAS, install_command, locate

    missing = {m: extra for extra in extras for m in EXTRAS[extra] if not locate(m).here}
    if missing:
        _fail(f"this command needs {', '.join(missing)}: {install_command(*dict.fromkeys(missing.values()))}", 1)


def _need_folder_of(option: str, file: Path | None) -> None:
    """Ends the command where the folder that a file is to be written into is not there: before torch is imported."""
    if file is not None and not file.absolute().parent.is_dir():
        _fail(f"{option} = {file}: the folder {file.parent} does not exist; make it, or name a file in another one", 2)


def _refusing_bad_input(work: Callable[[], Any]) -> Any:
    """The result of ``work``; input that it refuses ends the command with the message alone."""
    try:
        return work()
    except (ValueError, RuntimeError) as e:
        # PlanError is a RuntimeError of a module that needs torch: told by name, so that a wrong recipe needs no torch
        if isinstance(e, RuntimeError) and type(e).__name__ != "PlanError":
            raise
        _fail(str(e), 2)


def _show_version(wanted: bool) -> None:
    if wanted:
        from layerplan import __version__

        print(f"layerplan {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Layers for Megatron models, planned onto the best kernels for the GPU at hand."""
    from .settings import SettingsError, settings

    if context.invoked_subcommand == "doctor":  # it reports wrong variables instead of ending at them
        return
    try:
        level = settings().log
    except SettingsError as e:
        _fail(f"environment: {e}", 2)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("layerplan").setLevel(level.upper())


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, what can run here, and what stands in the way (exit code 1 where something does)."""
    from .doctor import collect, render

    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        render(facts, _console())
    raise typer.Exit(1 if facts["problems"] else 0)


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="An op of the table, for example rms_norm, linear, sdpa.")],
    shape: Annotated[list[str] | None, typer.Option("--shape", help="Input port, sizes, dtype: x=4096x8192:bfloat16. Repeatable.")] = None,
    arch: Annotated[str | None, typer.Option("--arch", help="sm_80, sm_89, sm_90, sm_100, sm_103, sm_120, cpu, or a GPU's name such as H100.")] = None,
    attr: Annotated[list[str] | None, typer.Option("--attr", help="Attribute of the op, value in JSON: causal=true. Repeatable.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="auto, strict or reference.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="Force one engine, for example norm/torch.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which engine would run one op on an arch, and why the others would not. Needs no GPU."""
    from .planner.explain import check_op, example, required_ports
    from .planner.explain import explain as explain_op

    def work() -> Any:
        check_op(op)
        missing = [option for option, given in (("--shape", shape), ("--arch", arch)) if not given]
        if missing:
            raise ValueError(f"{' and '.join(missing)} must be given: {op} takes the input ports {', '.join(required_ports(op))}; for example\n"
                             f"  {example(op)}")  # fmt: skip
        return explain_op(op, parse_shapes(shape), arch, policy=policy, engine=engine, **parse_attributes(attr or []))

    found = _refusing_bad_input(work)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(found)
        if found.error:
            print(found.error, file=sys.stderr)
    raise typer.Exit(0 if found.error is None else 1)


@app.command()
def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    arch: Annotated[str | None, typer.Option("--arch", help="Plan for this arch; default: plan.arch of the recipe, or sm_90.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write a plan file that plan.file=FILE pins on that arch.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a recipe's layers for an arch and say what would run. Needs no GPU."""
    from ..recipes import load_recipe
    from ..recipes.config import refuse_without_plans
    from .engines.arch import Arch

    _need_folder_of("--save", save)
    chosen = _refusing_bad_input(lambda: load_recipe(recipe, overrides or []))
    _refusing_bad_input(lambda: refuse_without_plans(chosen, "shown"))
    target = _refusing_bad_input(lambda: Arch.parse(arch or chosen.plan.arch or "sm_90"))
    from ..recipes.estimate import estimate_recipe

    found = _refusing_bad_input(lambda: estimate_recipe(chosen, target))
    if save is not None:
        from .planner import plan_file

        try:
            plan_file.save(save, found.pins())
        except OSError as e:
            _fail(f"--save = {save}: cannot be written ({e.strerror}); name a file that can be", 2)
    print(json.dumps(found.to_json(), indent=2) if as_json else found)


@app.command("compile")
def compile_(
    recipe: RecipeName,
    overrides: Overrides = None,
    arch: Annotated[list[str] | None, typer.Option("--arch", help="sm_90a, H100, ... Repeatable; default as plan.")] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="Processes that compile.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Compile the kernels that a recipe's layers need, into the cache (exit code 1 where one fails). Needs no GPU."""
    from ..recipes import load_recipe
    from .engines.arch import Arch
    from .settings import cache_folders

    chosen = _refusing_bad_input(lambda: load_recipe(recipe, overrides or []))
    names = arch or [chosen.plan.arch or "sm_90"]
    targets = _refusing_bad_input(lambda: list(dict.fromkeys(map(Arch.parse, names))))
    if not all(a.is_gpu for a in targets):
        _fail("--arch = cpu: kernels are compiled for GPUs; name one such as sm_90", 2)
    from ..recipes.compile import compile_recipe

    def tell(done: Any) -> None:
        seconds = "" if done.seconds is None else f"{done.seconds:6.1f} s"
        print(f"{done.arch} {done.state:<10} {seconds:>8} {done.name}", file=sys.stderr)

    found = _refusing_bad_input(lambda: compile_recipe(chosen, targets, jobs, cache_folders(), tell))
    print(json.dumps(found.to_json(), indent=2) if as_json else found)
    raise typer.Exit(1 if found.failed else 0)


@app.command()
def tune(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="Records to write, or to add to; default: plan.records, or records.json.")] = None,
    budget: Annotated[float, typer.Option("--budget", min=0.0, help="Seconds after which no further region is begun.")] = 600.0,
    device: Annotated[str, typer.Option("--device", help="cuda or cpu.")] = "cuda",
) -> None:
    """Measure what the engines offer for a recipe's layers on the GPU at hand, and write records that ranking reads."""
    from ..recipes import load_recipe

    chosen = _refusing_bad_input(lambda: load_recipe(recipe, overrides or []))
    file = out or Path(chosen.plan.records or "records.json")
    _need_folder_of("--out", file)
    from ..recipes.tune import tune_recipe

    found = _refusing_bad_input(lambda: tune_recipe(chosen, file, budget, device))
    print(found)
    raise typer.Exit(1 if found.lost else 0)


@app.command()
def pretrain(
    recipe: RecipeName,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate, print plan, parameters, memory and time; train nothing.")] = False,
) -> None:
    """Pretrain a model from a recipe, resuming from its newest whole checkpoint. Under torchrun for several processes."""
    if not dry_run:
        _need("megatron", "train")
    from .training.launch import pretrain_command

    raise typer.Exit(pretrain_command(recipe, overrides or [], dry_run))


@app.command()
def compare(
    recipe: RecipeName,
    a: Annotated[str, typer.Argument(metavar="A", help="auto, strict, reference, with PATTERN=POLICY rows after commas; a plan file FILE.json; megatron.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other side, in the same words.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run one batch under two policies and name the first module that errs beyond the rule (exit code 1 where one does)."""
    with_data = any(o.startswith("data.prefix=") for o in overrides or [])
    _need("megatron", *(("train",) if with_data else ()))
    from .training.quiet import quiet

    quiet()  # before Megatron is imported
    from .training.compare import compare_command

    raise typer.Exit(compare_command(recipe, a, b, overrides or [], as_json))


@data_app.command()
def prepare(
    inputs: Annotated[list[Path], typer.Argument(help="Text files, folders of them, or JSON-lines files.")],
    output_prefix: Annotated[Path, typer.Option("--output-prefix", help="Path of the dataset without .bin and .idx.")],
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="bpe (trained on the inputs) or byte.")] = "bpe",
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Size of the BPE vocabulary.")] = 2048,
    jsonl_key: Annotated[str, typer.Option("--jsonl-key", help="Field that holds the text in JSON lines.")] = "text",
) -> None:
    """Turn text or JSON lines into a Megatron indexed dataset with its tokenizer."""
    _need("megatron", "train")
    from .training.data_prepare import prepare_command

    raise typer.Exit(prepare_command(inputs, output_prefix, tokenizer, vocab_size, jsonl_key))


def _cache_folder() -> Path:
    """The folder that new kernels go into."""
    from .settings import cache_folders

    folders = cache_folders()
    if not folders:
        _fail("LAYERPLAN_CACHE is not set, and there is no home for a cache of compiled kernels; set it to a folder", 2)
    return folders[0]


def _of_cache(work: Callable[[Path], Any]) -> Any:
    """``work`` on the cache's folder; files that cannot be read or written end the command with the message alone."""
    from .plan_cache.key import KernelError

    folder = _cache_folder()
    try:
        return work(folder)
    except (KernelError, OSError) as e:
        _fail(str(e), 2)


@cache_app.command()
def show(as_json: AsJson = False) -> None:
    """List the compiled kernels of every folder of the cache."""
    from .plan_cache.archive import listing
    from .planner.text import aligned
    from .settings import cache_folders

    _cache_folder()
    found = [listing(folder) for folder in cache_folders()]
    if as_json:
        print(json.dumps([f.to_json() for f in found], indent=2))
        return
    for f in found:
        if f.folder.exists() and not f.folder.is_dir():
            print(f"{f.folder}: is not a folder\n")
            continue
        print("\n".join(aligned(f.rows())) if f.entries else "no kernels")
        print(f"{f.folder}: {len(f.entries)} kernels, {f.nbytes / 2**20:.1f} MiB, {len(f.faults)} broken files")
        print("object files are not read for this: 'layerplan cache verify' does\n")


@cache_app.command()
def verify() -> None:
    """Check every file of the cache against its checksum, and name what is broken (exit code 1 where something is)."""
    from .plan_cache.disk import scan

    entries, faults = _of_cache(lambda folder: scan(folder, whole=True))
    for fault in faults:
        print(fault)
    print(f"{len(entries)} whole, {len(faults)} files that are not: they are ignored, and replaced by the next compile")
    raise typer.Exit(1 if faults else 0)


@cache_app.command("export")
def export_(
    file: Annotated[Path, typer.Argument(help="The tar file to write.")],
    arch: Annotated[str | None, typer.Option("--arch", help="Only kernels for this arch.")] = None,
) -> None:
    """Write the compiled kernels to a tar file, to be imported on another machine."""
    from .engines.arch import Arch
    from .plan_cache.archive import write_archive
    from .plan_cache.disk import scan
    from .plan_cache.key import chip

    wanted = None if arch is None else _refusing_bad_input(lambda: chip(Arch.parse(arch)))

    def work(folder: Path) -> int:
        entries, _ = scan(folder, whole=True)
        chosen = [e for e in entries if wanted in (None, e.facts["inputs"]["arch"])]
        if not chosen:
            has = ", ".join(sorted({e.facts["inputs"]["arch"] for e in entries}))
            _fail(f"nothing to export: {folder} has {f'kernels for {has} alone' if has else 'no whole kernels'}", 1)
        return write_archive(chosen, file)

    print(f"{_of_cache(work)} kernels to {file}")


@cache_app.command("import")
def import_(file: Annotated[Path, typer.Argument(help="A tar file of 'layerplan cache export'.")]) -> None:
    """Take the kernels of a tar file into the cache; what is broken is named (exit code 1 where something is)."""
    from .plan_cache.archive import read_archive

    taken, refused, there = _of_cache(lambda folder: read_archive(file, folder))
    for fault in refused:
        print(fault, file=sys.stderr)
    print(f"{len(taken)} kernels taken, {there} were there already, {len(refused)} files refused")
    raise typer.Exit(1 if refused else 0)


@cache_app.command("prune")
def prune_(
    days: Annotated[float | None, typer.Option("--days", min=0.0, help="Remove what was not used for so long.")] = None,
    max_mib: Annotated[float | None, typer.Option("--max-mib", min=0.0, help="Keep so much, the latest used.")] = None,
    other_versions: Annotated[bool, typer.Option("--other-versions", help="Remove other compiler versions'.")] = False,
) -> None:
    """Remove broken files, and the compiled kernels that the options name."""
    from .plan_cache.archive import Limits, prune
    from .plan_cache.disk import scan

    limits = Limits(days, None if max_mib is None else int(max_mib * 2**20), other_versions)
    gone, broken = _of_cache(lambda folder: prune(folder, limits))
    kept = len(_of_cache(lambda folder: scan(folder, whole=True))[1])
    young = f"; {kept} broken files kept: younger than a minute, they may still be written" if kept else ""
    print(f"{len(gone)} kernels and {len(broken)} broken files removed{young}")


@app.command()
def complete(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
    prompt: Annotated[str, typer.Argument(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to add at most.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
) -> None:
    """Complete a prompt with a trained checkpoint."""
    _need("megatron", "train")
    from .training.complete import complete_command

    raise typer.Exit(complete_command(checkpoint, prompt, max_new_tokens, temperature, seed))


@app.command()
def demo(workdir: Annotated[Path, typer.Option("--workdir", help="Folder for data, checkpoints and curve.")] = Path("demo_run")) -> None:
    """Prepare text found on this machine, train a tiny model on it, resume, and complete a prompt: about three minutes."""
    _need("megatron", "train")
    from .training.demo import run_demo

    raise typer.Exit(run_demo(workdir))


# ---- values of options ---------------------------------------------------------------------------------------------


def parse_shapes(texts: list[str]) -> dict[str, tuple[tuple[int, ...], str]]:
    """``["x=2x3:bfloat16"]`` -> ``{"x": ((2, 3), "bfloat16")}``; ``x=:float32`` is a scalar. ValueError lists every wrong one."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    problems = []
    for text in texts:
        name, _, rest = text.partition("=")
        sizes, _, dtype = rest.partition(":")
        parts = sizes.split("x") if sizes else []
        if not name.isidentifier() or not dtype.isidentifier() or not all(p.isdecimal() for p in parts):
            problems.append(f"--shape = {text!r}: must read NAME=SIZExSIZE:DTYPE, for example x=4096x8192:bfloat16")
        elif name in shapes:
            problems.append(f"--shape = {text!r}: {name} is given twice; drop one")
        else:
            shapes[name] = (tuple(map(int, parts)), dtype)
    if problems:
        raise ValueError("\n".join(problems))
    return shapes


def parse_attributes(texts: list[str]) -> dict[str, Any]:
    """``["causal=true", "window=[127, 0]"]`` -> Python values; lists become tuples. ValueError lists every wrong one."""
    attrs: dict[str, Any] = {}
    problems = []
    for text in texts:
        name, _, value = text.partition("=")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value if value.isidentifier() else None  # a bare word is a string: layout=sbhd
        if not name.isidentifier() or (parsed is None and value != "null"):
            problems.append(f"--attr = {text!r}: must read NAME=VALUE with a JSON value or a word, for example causal=true")
        elif name in attrs:
            problems.append(f"--attr = {text!r}: {name} is given twice; drop one")
        attrs[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    if problems:
        raise ValueError("\n".join(problems))
    return attrs


def _console() -> Any:
    """A rich Console; wide where nobody's terminal sets the width, so that a pipe gets whole lines."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200)
