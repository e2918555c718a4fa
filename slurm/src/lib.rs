//! The SPANK plugin: runs inside of `sbatch`, `srun` and `slurmstepd`, which are Slurm's.
//!
//! Users get options (`--gpu-mem`, `--gpu-share`, `--gpu-class`), checked at submission. On the
//! node, `slurmstepd` registers the job with the host's arbiter as root for its user; the tasks get
//! the preload library and the job's token, and nothing else of ours runs in them. When
//! `slurmstepd` ends, the arbiter knows by itself.
//!
//! [`plugin!`] makes a loadable library of this crate, one for each Slurm release: Slurm loads
//! plugins of its own major and minor version only. No header and no library of Slurm's is needed
//! to build it; its functions are looked up in the process that loads us ([`host`]).
//!
//! What must stay true: nothing of ours ends or stops a process of Slurm's. No panic leaves a hook,
//! every wait has a deadline, and what fails is said to the user in one line and fails the step,
//! not the node.

pub mod arguments;
pub mod enforce;
pub mod host;
pub mod options;
pub mod plugin;
pub mod step;

#[cfg(test)]
testbed::starts_clean!();

/// Exports the plugin for one Slurm release from the calling crate.
#[macro_export]
macro_rules! plugin {
    ($release:literal) => {
        use std::ffi::{c_char, c_int, c_void};

        /// Its name in Slurm's messages.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "Slurm's name")]
        pub static plugin_name: [u8; 7] = *b"sublet\0";

        /// What kind of plugin this is.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "Slurm's name")]
        pub static plugin_type: [u8; 6] = *b"spank\0";

        /// The release of Slurm that loads it.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "Slurm's name")]
        pub static plugin_version: u32 = $release;

        /// Of the plugin, for Slurm's list.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "Slurm's name")]
        pub static spank_plugin_version: u32 = 1;

        $crate::plugin! { @hook slurm_spank_init init $release }
        $crate::plugin! { @hook slurm_spank_init_post_opt init_post_opt $release }
        $crate::plugin! { @hook slurm_spank_task_init_privileged task_init_privileged $release }
        $crate::plugin! { @hook slurm_spank_task_init task_init $release }
    };
    (@hook $symbol:ident $hook:ident $release:literal) => {
        #[doc = concat!("`", stringify!($symbol), "` of SPANK.")]
        ///
        /// # Safety
        /// As spank(7) says: Slurm calls it with its handle and the words of plugstack.conf.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(
            spank: *mut c_void,
            argc: c_int,
            argv: *const *const c_char,
        ) -> c_int {
            // SAFETY: the caller's promise.
            unsafe { $crate::plugin::$hook(spank, argc, argv, $release) }
        }
    };
}
