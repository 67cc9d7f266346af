"""How ranks find one another: launchers' environment, Slurm, the rendezvous."""
