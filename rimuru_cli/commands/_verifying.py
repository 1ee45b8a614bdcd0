"""How the result of `rimuru verify` is shown."""

from __future__ import annotations

from rimuru_cli.errors import explain
from rimuru_cli.hub.verification import Verification
from rimuru_cli.output import Output, format_bytes

_AGAINST = {
    "manifest": "the manifest",
    "cache": "the names of the cache's blobs",
    "download metadata": "what was noted when it was downloaded",
    "copy": "what was noted when they were made",
    "headers": "their own headers only",
}


def print_verification(result: Verification, out: Output) -> int:
    """Print it and return the exit code; raises the error that names the bad files, except with --json, where it is part of the object."""
    error = result.error()
    if out.json:
        values = {
            "model": result.name,
            "path": str(result.path),
            "commit": result.commit,
            "against": result.against,
            "ok": error is None,
            "files": [vars(file) for file in result.files],
        }
        failure = None if error is None else explain(error)
        out.emit(values if failure is None else {**values, **failure.to_dict()})
        return 0 if failure is None else failure.exit_code
    if error is not None:
        raise error
    unknown = [file for file in result.files if file.state == "unknown"]
    checked = [file for file in result.files if file.state == "ok"]
    if checked:
        size = format_bytes(sum(file.num_bytes or 0 for file in checked))
        out.line(f"{result.name}: {len(checked)} files, {size}, all as they should be (compared with {_AGAINST[result.against]})")
    else:
        out.line(f"{result.name}: complete, and its headers are sound")
    if unknown:
        names = ", ".join(file.name for file in unknown[:5]) + (f" and {len(unknown) - 5} more" if unknown[5:] else "")
        out.warn(f"no checksum is known for {names}, so damage inside would not be noticed.")
    return 0
