"""Choice of the trials that go on: pure rules over what trials have come to."""
