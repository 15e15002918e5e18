"""Start a command on several machines: by ssh, Slurm or Kubernetes. torchrun's engine runs the ranks of each node."""
