"""The command `kvmem doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

HELP = """Say whether CUDA can be used here, and why not.

Which runtime is used and where it comes from, driver, devices, their links
and abilities, and the limits of this machine that matter to host memory. What
it says about a problem is also what open_device("cuda") raises.

Opens each device once, as an engine would, which makes a context on it.
Exits 0 if a device can be used, 1 if none can, 2 if it could not look.

Example: kvmem doctor --json
"""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def doctor(json_output: Json = False) -> None:
    import kvmem
    from kvmem.doctor.checks import check
    from kvmem.doctor.facts import probe

    try:
        facts = probe()
    except kvmem.InvalidArgument as error:
        typer.echo(f"kvmem doctor: {error}", err=True)
        raise typer.Exit(2) from None
    findings = check(facts)
    if json_output:
        found = {**facts.to_json(), "findings": [asdict(each) for each in findings]}
        typer.echo(json.dumps(found))
    else:
        from rich.console import Console

        from kvmem.doctor.table import show

        show(facts, findings, Console(markup=False, emoji=False, highlight=False))
    raise typer.Exit(0 if facts.usable else 1)
