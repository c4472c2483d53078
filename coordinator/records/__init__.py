"""The run log on its disk: records, the mirror that knows where they end, and the events made of them."""
