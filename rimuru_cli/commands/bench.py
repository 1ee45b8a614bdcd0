"""`rimuru bench`: measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.commands._workload import workload
from rimuru_cli.output import Output, print_report

bench_app = typer.Typer(help="Measure models, kernels, the link to the GPU, the page allocator.", no_args_is_help=True)
bench_app.command()(workload)


@bench_app.command()
def allocator(json: options.JsonFlag = False) -> None:
    """Measure how long the page allocator takes."""
    from rimuru_cli.bench.allocator import run_allocator_bench

    print_report(run_allocator_bench(), Output(json=json))


@bench_app.command()
def decode(
    model: options.OptionalModelArg = None,
    versus: Annotated[
        str | None,
        typer.Option(
            "--vs",
            metavar="transformers|MODEL",
            help="Also run the same file in transformers (a development dependency), or another model in as much memory.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to decode in each run.")] = 64,
    residency: Annotated[str, typer.Option("--residency", metavar="SHARE", help="Share of experts that is resident, as in 50%.")] = "100%",
    json: options.JsonFlag = False,
) -> None:
    """Measure decoding speed, one token at a time."""
    from rimuru_cli.settings import parse_share

    out = Output(json=json)
    share = parse_share(residency, "--residency")
    from rimuru_cli.chat.interrupt import loading_libraries

    with loading_libraries():
        from rimuru_cli.bench.decode import run_decode_bench
        from rimuru_cli.hub.resolve import resolve_model

    with out.progress() as progress:
        resolved = resolve_model(model, progress=progress)
        other = None if versus in (None, "transformers") else resolve_model(versus, progress=progress).path
    with out.progress("items") as progress:
        report = run_decode_bench(resolved.path, versus=versus, other=other, tokens=tokens, residency=share, progress=progress)
    print_report(report, out)


@bench_app.command()
def dashboard(
    model: options.OptionalModelArg = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens to decode in each run.")] = 64,
    residency: Annotated[str, typer.Option("--residency", metavar="SHARE", help="Share of experts that is resident, as in 50%.")] = "50%",
    json: options.JsonFlag = False,
) -> None:
    """Measure what it costs an engine that `rimuru dashboard` looks on."""
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.settings import parse_share

    out = Output(json=json)
    share = parse_share(residency, "--residency")
    with loading_libraries():
        from rimuru_cli.bench.publishing import run_publishing_bench
        from rimuru_cli.hub.resolve import resolve_model

    with out.progress() as progress:
        resolved = resolve_model(model, progress=progress)
    with out.progress("items") as progress:
        report = run_publishing_bench(resolved.path, tokens=tokens, residency=share, progress=progress)
    print_report(report, out)


@bench_app.command()
def agreement(
    model: options.OptionalModelArg = None,
    device: Annotated[
        str, typer.Option("--device", metavar="cuda|emulated", help="What is judged: the GPU, or its way taken on the CPU.")
    ] = "cuda",
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="How many of the built-in prompts to answer.", show_default="all")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens of an answer.")] = 64,
    residency: Annotated[
        str | None, typer.Option("--residency", metavar="SHARE", help="Share of experts on the GPU, as in 50%.", show_default="as it fits")
    ] = None,
    versus: Annotated[
        str | None,
        typer.Option("--vs", metavar="transformers", help="Judge transformers in bfloat16, too: the yardstick (a development dependency)."),
    ] = None,
    json: options.JsonFlag = False,
) -> None:
    """Compare the GPU's answers in bfloat16 with the CPU's in float32; exit code 4 if they differ by more than the format explains."""
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.settings import parse_share
    from rimuru_models.errors import VerificationError

    out = Output(json=json)
    share = None if residency is None else parse_share(residency, "--residency")
    with loading_libraries():
        from rimuru_cli.bench.agreement import run_agreement_bench
        from rimuru_cli.hub.resolve import resolve_model

    with out.progress() as progress:
        resolved = resolve_model(model, progress=progress)
    with out.progress("items") as progress:
        report = run_agreement_bench(
            resolved.path, device=device, prompts=prompts, tokens=tokens, residency=share, versus=versus, progress=progress
        )
    print_report(report, out)
    if report["exceeded"]:
        if not json:
            out.note(f"error: The answers differ by more than the tolerance: {', '.join(report['exceeded'])}.", "red")
        raise typer.Exit(VerificationError.exit_code)


@bench_app.command()
def kl(
    model: options.OptionalModelArg = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL2", help="Judge this model: a quantised one, say.", show_default=False)
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option("--quant", metavar="int8|int4", help="Judge a quantised copy, made now if there is none.", show_default=False),
    ] = None,
    kv: Annotated[str, typer.Option("--kv", metavar="auto|q8", help="Judge with keys and values stored so.")] = "auto",
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="UTF-8 text to read.", show_default="one that ships with rimuru")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="At most so many tokens of it.")] = 1024,
    device: Annotated[str, typer.Option("--device", metavar="cpu|cuda", help="What computes; only the CPU can be told experts.")] = "cpu",
    json: options.JsonFlag = False,
) -> None:
    """Measure what quantised weights or an 8-bit KV cache do to answers: KL divergence in nats, likeliest tokens, perplexity."""
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.settings import BY_NAME, checked
    from rimuru_models.errors import UsageError

    out = Output(json=json)
    precision = checked(BY_NAME["kv"], kv, "--kv")
    wanted = None if quant is None else checked(BY_NAME["quant"], quant, "--quant")
    if against is not None and wanted not in (None, "none"):
        raise UsageError("--against and --quant both name what is judged.", hint="Leave one of them out.")
    with loading_libraries():
        from rimuru_cli.bench.divergence import run_divergence_bench
        from rimuru_cli.chat.loading import quantized, read_text_file
        from rimuru_cli.hub.resolve import resolve_model

    words = None if text is None else read_text_file(text.expanduser())
    with out.progress() as progress:
        resolved = resolve_model(model, progress=progress)
        judged = resolve_model(against, progress=progress) if against is not None else quantized(resolved, wanted, progress)
    with out.progress("items") as progress:
        report = run_divergence_bench(
            resolved.path,
            against=None if judged.path == resolved.path else judged.path,
            kv=precision,
            text=words,
            tokens=tokens,
            device=device,
            progress=progress,
        )
    print_report(report | {"model": resolved.name}, out)


@bench_app.command()
def recall(
    model: options.OptionalModelArg = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="How many of the held-out built-in prompts to run.", show_default="all")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to generate after each prompt.")] = 64,
    json: options.JsonFlag = False,
) -> None:
    """Measure how well a layer's experts are guessed a layer early, by the next layer's router on this layer's input."""
    from rimuru_cli.chat.interrupt import loading_libraries

    out = Output(json=json)
    with loading_libraries():
        from rimuru_cli.bench.recall import run_recall_bench
        from rimuru_cli.hub.resolve import resolve_model

    with out.progress() as progress:
        resolved = resolve_model(model, progress=progress)
    with out.progress("items") as progress:
        report = run_recall_bench(resolved.path, prompts=prompts, tokens=tokens, progress=progress)
    print_report(report, out)


@bench_app.command()
def link(json: options.JsonFlag = False) -> None:
    """Measure how fast bytes move between memory and the GPU, on the GPU, and out of memory."""
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.commands._tables import print_link

    out = Output(json=json)
    with loading_libraries():
        from rimuru_cli.bench.link import run_link_bench

    with out.progress("items") as progress:
        report = run_link_bench(progress=progress)
    print_link(report, out)


@bench_app.command()
def load(
    model: options.OptionalModelArg = None,
    cold: Annotated[bool, typer.Option("--cold", help="Let the system forget the files first, so that the disk is measured.")] = False,
    most: Annotated[
        str | None, typer.Option("--most", metavar="SIZE", help="Load no more than so much of a large model.", show_default="everything")
    ] = None,
    json: options.JsonFlag = False,
) -> None:
    """Measure how fast a model's experts are loaded into page-locked memory, beside plain reading of the same files."""
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.commands._tables import print_load
    from rimuru_cli.settings import parse_size

    out = Output(json=json)
    size = None if most is None else parse_size(most)
    if size is not None and size.num_bytes is None:
        raise typer.BadParameter("give a size such as 4GiB", param_hint="--most")
    with loading_libraries():
        from rimuru_cli.bench.load import run_load_bench
        from rimuru_cli.hub.resolve import resolve_model

    with out.progress() as progress:
        resolved = resolve_model(model, progress=progress)
    with out.progress("items") as progress:
        report = run_load_bench(resolved.path, cold=cold, budget=None if size is None else size.num_bytes, progress=progress)
    print_load(report, out)


@bench_app.command()
def kernels(
    op: Annotated[
        list[str] | None, typer.Option("--op", metavar="moe|attention|fetch|recurrent|packed-moe", help="Only this op; may be repeated.")
    ] = None,
    json: options.JsonFlag = False,
) -> None:
    """Measure the kernels on the GPU, beside torch and the floor."""
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.commands._tables import print_kernels

    out = Output(json=json)
    with loading_libraries():
        from rimuru_cli.bench.kernel_reports import run_kernel_reports

    with out.progress("items") as progress:
        report = run_kernel_reports(op or (), progress)
    print_kernels(report, out)


def _tokens(
    ctx: typer.Context,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[pp] [tg]", help="A further test for the same run.", show_default=False)
    ] = None,
    model_shape: Annotated[
        str,
        typer.Option(
            "--model-shape", metavar="NAME", help="qwen3-30b-a3b, qwen3.5-35b-a3b, …; tiny and tiny-hybrid also run without a GPU."
        ),
    ] = "qwen3-30b-a3b",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Needed: says that the weights are made up, which speed does not depend on.")
    ] = False,
    vram: Annotated[
        list[str] | None,
        typer.Option("--vram", "--memory", metavar="SIZE", help="Ceiling: 24GiB, 50%, or none; may be repeated.", show_default="none"),
    ] = None,
    routing_trace: Annotated[
        Path | None,
        typer.Option(
            "--routing-trace",
            metavar="FILE|synthetic",
            help="Recorded routing that tg replays, beside uniform routing; synthetic: one with the habits of a recorded one.",
            show_default=False,
        ),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option("--quant", metavar="NAME", help="What experts are packed as: int4, int8, fp8, mxfp4, nvfp4, …", show_default="bf16"),
    ] = None,
    dense: Annotated[
        str | None, typer.Option("--dense", metavar="NAME", help="What all other matrices are packed as: int8 …", show_default="bf16")
    ] = None,
    kv: Annotated[str, typer.Option("--kv", metavar="auto|q8", help="What keys and values are stored as.")] = "auto",
    prompt: Annotated[
        list[int] | None,
        typer.Option("--prompt", "-p", metavar="TOKENS", min=1, help="Size for pp; may be repeated.", show_default="512 and 4096"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", metavar="TOKENS", min=1, help="Tokens that tg generates.")] = 128,
    sequences: Annotated[
        list[int] | None,
        typer.Option("--sequences", metavar="N", min=1, max=8, help="Sequences of tg at once; may be repeated.", show_default="1"),
    ] = None,
    json: options.JsonFlag = False,
) -> None:
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.commands._tables import print_token_rows
    from rimuru_cli.settings import BY_NAME, checked, parse_size

    out = Output(json=json)
    precision = checked(BY_NAME["kv"], kv, "--kv")
    if not random_weights:
        raise typer.BadParameter("pp and tg measure made-up weights; add --random-weights", param_hint="--random-weights")
    ceilings = [None if size.strip().lower() == "none" else parse_size(size) for size in vram or ["none"]]
    drawn = routing_trace == Path("synthetic") and not Path("synthetic").exists()
    with loading_libraries():
        from rimuru_cli.bench.token_rows import run_token_rows

    with out.progress() as progress:
        report = run_token_rows(
            [ctx.info_name or "", *(more or [])],
            shape=model_shape,
            ceilings=ceilings,
            trace=None if drawn else routing_trace,
            drawn=drawn,
            quant=quant,
            dense=dense,
            kv=precision,
            prompts=prompt or (),
            tokens=tokens,
            sequences=tuple(dict.fromkeys(sequences or [1])),
            progress=progress,
        )
    print_token_rows(report, out)


# Two names for one command, so that `bench pp tg` reads like llama-bench: the name is the first test, its words are the others.
bench_app.command("pp", help="Measure reading prompts (tokens per second). `rimuru bench pp tg …` measures generation in the same run.")(
    _tokens
)
bench_app.command("tg", help="Measure generating tokens (tokens per second). `rimuru bench pp tg …` measures prompts in the same run.")(
    _tokens
)


@bench_app.command()
def elastic(
    model_shape: Annotated[
        str,
        typer.Option(
            "--model-shape", metavar="NAME", help="qwen3-30b-a3b, qwen3.5-35b-a3b, …; tiny and tiny-hybrid also run without a GPU."
        ),
    ] = "qwen3-30b-a3b",
    vram: Annotated[
        str | None, typer.Option("--vram", "--memory", metavar="SIZE", help="Ceiling: 24GiB or 50%.", show_default="none")
    ] = None,
    lower: Annotated[
        str | None,
        typer.Option(
            "--lower",
            metavar="SIZE",
            help="By how much the ceiling is lowered in mid-answer.",
            show_default="4GiB, or what the answer allows",
        ),
    ] = None,
    json: options.JsonFlag = False,
) -> None:
    """Grow one conversation (random weights) to the longest context, then move the ceiling in mid-answer: speed, memory, same text."""
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.commands._tables import print_elastic
    from rimuru_cli.settings import parse_size
    from rimuru_models.errors import VerificationError

    out = Output(json=json)
    ceiling = None if vram is None else parse_size(vram)
    lowered = None if lower is None else parse_size(lower)
    with loading_libraries():
        from rimuru_cli.bench.token_rows import run_elastic_rows

    with out.progress() as progress:
        report = run_elastic_rows(model_shape, ceiling, lowered, progress=progress)
    print_elastic(report, out)
    if not report["ceiling"]["same_text"]:
        raise VerificationError(
            "The answer under a moving ceiling differs from the undisturbed one.",
            hint="This is a bug in rimuru; please report it with the output of: rimuru bench elastic --json",
        )
