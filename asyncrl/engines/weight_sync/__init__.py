"""Weight updates from the trainer's ranks to every engine: by broadcast, by CUDA IPC or through files."""
