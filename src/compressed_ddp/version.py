"""The version, in its one place: the build, the handshake and the changelog test read it here."""

__version__ = "0.1.0"
WIRE_VERSION = 1
