#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
srun --mpi=pmi2 -K python train.py
