"""Byte streams between workers that cannot dial each other: carried by a relay, called and answered at its two ends."""
