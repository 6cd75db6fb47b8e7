"""The command line. Importing it loads neither torch nor transformers; the commands do."""
