"""Leadership among several coordinators."""
