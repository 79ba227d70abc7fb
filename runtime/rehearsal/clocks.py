"""What every stream of a device has waited for: enough to tell a read that comes too early.

A stream does what it is given in order, and others beside it. Each has a count of what it was
given; `Clocks` knows of each up to which count of every other it has waited (a vector clock:
Mattern, "Virtual Time and Global States of Distributed Systems", 1988). The host is one more
stream: whatever it starts knows what the host knew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

HOST = "host"
Stream = Hashable
Known = dict[Stream, int]


@dataclass(slots=True)
class Clocks:
    known: dict[Stream, Known] = field(default_factory=dict)

    def of(self, stream: Stream) -> Known:
        return self.known.setdefault(stream, {stream: 0})

    def starts(self, stream: Stream) -> int:
        """``stream`` is given one more thing; its count."""
        self.wait(stream, self.of(HOST))
        own = self.of(stream)
        own[stream] += 1
        return own[stream]

    def now(self, stream: Stream) -> Known:
        """What somebody knows who has waited for ``stream``."""
        return dict(self.of(stream))

    def wait(self, stream: Stream, known: Known) -> None:
        """What ``stream`` is given from now on comes behind what is ``known``."""
        own = self.of(stream)
        for other, count in known.items():
            own[other] = max(count, own.get(other, 0))

    def sees(self, stream: Stream, by: Stream, count: int) -> bool:
        """Whether ``stream`` comes behind the ``count``-th thing of ``by``."""
        return self.of(stream).get(by, 0) >= count


@dataclass(slots=True)
class Memory:
    """Who wrote a piece of memory last, and who has read it since: (stream, its count)."""

    written: tuple[Stream, int] | None = None
    read: Known = field(default_factory=dict)

    def reads(self, clocks: Clocks, stream: Stream, count: int) -> Stream | None:
        """The stream that a read does not wait for, if there is one."""
        early = None
        if self.written is not None and not clocks.sees(stream, *self.written):
            early = self.written[0]
        self.read[stream] = count
        return early

    def writes(self, clocks: Clocks, stream: Stream, count: int) -> Stream | None:
        """The same of a write, which comes behind all reads too."""
        earlier: Iterable[tuple[Stream, int]] = self.read.items()
        if self.written is not None:
            earlier = [self.written, *earlier]
        early = next((by for by, n in earlier if not clocks.sees(stream, by, n)), None)
        self.written, self.read = (stream, count), {}
        return early
