"""The command line, `kvmem`. Its libraries come with the extra `cli`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def make_app() -> typer.Typer:
    """Put the commands together. Raises ModuleNotFoundError without the extra `cli`."""
    import typer

    from kvmem.bench import command as bench_command
    from kvmem.doctor import command as doctor_command
    from kvmem.replay import command as replay_command

    app = typer.Typer(
        name="kvmem",
        help="Memory manager for offloading LLM KV caches.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            import kvmem

            typer.echo(f"kvmem {kvmem.__version__}")
            raise typer.Exit

    # A callback of its own keeps `replay` a command, however few there are.
    @app.callback()
    def common(
        version: bool = typer.Option(
            False, "--version", help="Print the version.", callback=show_version, is_eager=True
        ),
    ) -> None:
        del version

    app.command("doctor", help=doctor_command.HELP)(doctor_command.doctor)
    app.command("replay", help=replay_command.HELP)(replay_command.replay)
    app.command("bench", help=bench_command.HELP)(bench_command.bench)
    return app


def main() -> None:
    """Run the command line. Exit status: 0, 1 for a bad answer, 2 when it could not run."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"kvmem: needs {error.name}: pip install 'kvmem[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    make_app()()


if __name__ == "__main__":
    main()
