"""The page that people look at: what it shows, and to whom."""
