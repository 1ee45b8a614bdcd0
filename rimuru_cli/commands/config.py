"""`rimuru config`: every setting, its value, and where it came from."""

from __future__ import annotations

from typing import Annotated

import typer

from rimuru_cli.commands._options import JsonFlag
from rimuru_cli.output import Output, table


def config(
    json: JsonFlag = False,
    path: Annotated[bool, typer.Option("--path", help="Print only where the settings file is (it need not exist).")] = False,
) -> None:
    """Show each setting, its value and where it came from: a RIMURU_* variable, the settings file, or the default."""
    from rimuru_cli.settings import config_file, describe, resolve

    out = Output(json=json)
    file = config_file()
    if path:
        out.emit({"path": str(file)}) if json else out.line(str(file))
        return
    settings = resolve({}, file=file)
    for warning in settings.warnings:
        out.warn(warning)
    rows = describe(settings)
    if json:
        out.emit({"path": str(file), "exists": file.is_file(), "settings": rows, "warnings": settings.warnings})
        return
    out.note(f"Settings file: {file}{'' if file.is_file() else ' (does not exist)'}", "dim")
    out.line(table(["setting", "value", "from"], [[row["name"], row["shown"], row["where"] or "default"] for row in rows]))
