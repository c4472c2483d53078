"""Generated from protos/skein/wire/v1 by `make proto`; never edited."""
