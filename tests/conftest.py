"""For every test: an interrupt interrupts, also where the shell that started the tests ignores it (``make test &``)."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
