"""The ``autopar`` command: progress to stderr, results to stdout.

Exit codes: 0 done, 1 a plan that does not compute what its model computes, 2 a user's error, 3 no
plan fits. Nothing heavy is imported before a command runs: ``autopar --help`` is instant.
"""

from __future__ import annotations

import errno
import sys

from autopar.nouns.errors import UserError

STOPPED = 130
"""How typer ends a command on Ctrl-C."""
REFUSED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT),
}
"""Why a system refuses a file or a place, whoever asks for it; nothing of ours causes these."""

try:
    import typer

    from autopar.cli import doors, planning, reading, running
    from autopar.cli.progress import progress
except KeyboardInterrupt:  # most of the start of a command is spent there
    print("autopar: stopped", file=sys.stderr)
    sys.exit(STOPPED)

app = typer.Typer(
    name="autopar",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plan, emit, run and verify distributed training of an ordinary model.",
)
app.command()(planning.plan)
app.command()(planning.tune)
app.command()(planning.estimate)
app.command()(running.run)
app.command()(running.verify)
app.command()(running.rehearse)
app.command()(reading.explain)
app.command()(reading.report)
app.command("show")(reading.show_text)
app.command()(reading.diff)
app.command()(doors.export)
app.command("import")(doors.import_layout)
app.command()(running.profile)


def main() -> None:
    """The entry point: runs the command and turns a user's error into one message."""
    try:
        app()
    except UserError as error:
        progress(f"autopar: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        progress(f"autopar: {error.filename}: {error.strerror}; give another place")
        sys.exit(UserError.exit_code)
    except KeyboardInterrupt:
        progress("autopar: stopped")
        sys.exit(STOPPED)
    except SystemExit as end:
        if end.code == STOPPED:
            progress("autopar: stopped")
        raise
