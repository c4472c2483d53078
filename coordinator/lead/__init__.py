"""Who of several coordinators leads."""
