"""The command line: finds a command's file by its name and turns errors into one line and an exit code.

Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted. Commands import torch and the library only when run.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

import click

from draftwise import __version__

COMMANDS = ("generate", "chat", "bench", "predict", "tune", "train", "export", "pull", "doctor")


class Commands(click.Group):
    """One command a file: `draftwise NAME` is `command` in draftwise/cli/NAME.py."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"draftwise.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"no command {args[0]!r}; there are: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: draftwise generate 'Why is the sky blue?' --drafter ngram",
)
@click.version_option(__version__, prog_name="draftwise")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
@click.pass_context
def group(ctx: click.Context, traceback: bool) -> None:
    """Faster generation by speculative decoding, token for token what plain decoding says."""
    ctx.obj = {"traceback": traceback}
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments, stdout = list(sys.argv[1:] if arguments is None else arguments), sys.stdout
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = group.main(args=arguments, prog_name="draftwise", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (BrokenPipeError, SystemExit) as left:  # the reader of our output left, as `| head` does; click exits then
        if isinstance(left, SystemExit) and sys.stdout is stdout:  # click wraps it when its reader has left
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (click.Abort, KeyboardInterrupt):
        return 130
    except (click.ClickException, ValueError, OSError) as error:
        if arguments[:1] == ["--traceback"]:
            raise
        click.echo(f"draftwise: error: {_one_line(error)}", err=True)
        return 2


def _warn(
    message: Warning | str, category: object, filename: str, lineno: int, file: object = None, line: object = None
) -> None:
    click.echo(f"draftwise: warning: {message}", err=True)


def _one_line(error: Exception) -> str:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = error.format_message().rstrip(".")
        return f"{' '.join(message.split())}; see {error.ctx.command_path} --help"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or type(error).__name__).lower()}"
    return " ".join(str(error).split()) or type(error).__name__
