"""Parts that both services need as processes: options, logs, files and a folder."""
