//! The plugin for Slurm 26.05, which loads no plugin of another major or minor version.

slurm::plugin!(0x1a_05_00);
