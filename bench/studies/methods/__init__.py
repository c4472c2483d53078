"""Other ways to plan a step, each as its authors describe it, for problems that `skein plan` plans too."""
