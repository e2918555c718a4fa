//! The hooks: what Slurm calls, where, and what is kept in between.
//!
//! | hook | process | here |
//! |---|---|---|
//! | `init` | all | words of plugstack.conf, options |
//! | `init_post_opt` | `slurmstepd`, root | registers the job |
//! | `task_init_privileged` | the task, root | says what failed; mounts |
//! | `task_init` | the task, its user | variables |
//!
//! A step whose job cannot be registered fails in its tasks: a failure of `init_post_opt` would
//! count against the node, and Slurm might drain it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use control::Registered;

use crate::arguments::Arguments;
use crate::enforce;
use crate::host::{self, Context, Host, SpankOption};
use crate::options::{Asked, CLASS, EVICTABLE, MEM, SHARE, UNALIGNED};
use crate::step::{self, Step};

/// The options as `srun --help` shows them.
static OPTIONS: [SpankOption; 5] = [
    SpankOption {
        name: c"gpu-mem".as_ptr(),
        arginfo: c"SIZE".as_ptr(),
        usage: c"memory quota on the job's GPU: 8G, 512M".as_ptr(),
        has_arg: 1,
        val: MEM,
        callback: Some(on_option),
    },
    SpankOption {
        name: c"gpu-share".as_ptr(),
        arginfo: c"F".as_ptr(),
        usage: c"part of the GPU's time, above 0 and at most 1".as_ptr(),
        has_arg: 1,
        val: SHARE,
        callback: Some(on_option),
    },
    SpankOption {
        name: c"gpu-class".as_ptr(),
        arginfo: c"CLASS".as_ptr(),
        usage: c"guaranteed or opportunistic".as_ptr(),
        has_arg: 1,
        val: CLASS,
        callback: Some(on_option),
    },
    SpankOption {
        name: c"gpu-evictable".as_ptr(),
        arginfo: std::ptr::null(),
        usage: c"its memory may leave the GPU while it is suspended".as_ptr(),
        has_arg: 0,
        val: EVICTABLE,
        callback: Some(on_option),
    },
    SpankOption {
        name: c"gpu-unaligned".as_ptr(),
        arginfo: std::ptr::null(),
        usage: c"steps over several nodes may share GPUs, each node by itself".as_ptr(),
        has_arg: 0,
        val: UNALIGNED,
        callback: Some(on_option),
    },
];

/// For Slurm: go on.
const GOOD: c_int = 0;
/// For Slurm: this has failed.
const BAD: c_int = -1;

/// What hooks of one process leave for later ones; tasks have their copy by fork.
#[derive(Debug, Default)]
struct State {
    arguments: Option<Arguments>,
    asked: Asked,
    /// The step and its job on the arbiter.
    registered: Option<(Step, Registered, String)>,
    /// Why it has none.
    failure: Option<String>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    work(state.get_or_insert_default())
}

/// Runs a hook's work: nothing leaves it but its result.
fn hook(name: &str, work: impl FnOnce() -> Result<(), String>) -> c_int {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => GOOD,
        Ok(Err(text)) => {
            host::say(&text);
            BAD
        }
        Err(_) => {
            host::say(&format!(
                "{name} has failed inside; this is a bug of sublet's"
            ));
            BAD
        }
    }
}

/// The words of plugstack.conf.
///
/// # Safety
/// `argv` has `argc` texts.
unsafe fn words<'a>(argc: c_int, argv: *const *const c_char) -> Vec<&'a str> {
    if argv.is_null() {
        return Vec::new();
    }
    let count = usize::try_from(argc).unwrap_or(0);
    // SAFETY: the caller's promise.
    let pointers = unsafe { std::slice::from_raw_parts(argv, count) };
    let some = pointers.iter().filter(|word| !word.is_null());
    // SAFETY: as above; each ends with a NUL and lives through the hook.
    some.filter_map(|word| unsafe { CStr::from_ptr(*word) }.to_str().ok())
        .collect()
}

/// `slurm_spank_init`: in every process.
///
/// # Safety
/// Called by Slurm as spank(7) says.
pub unsafe fn init(
    spank: *mut c_void,
    argc: c_int,
    argv: *const *const c_char,
    _release: u32,
) -> c_int {
    hook("init", || {
        // SAFETY: the caller's promise.
        let (host, words) = unsafe { (Host::of(spank), words(argc, argv)) };
        let host = host.ok_or("this process has no SPANK")?;
        for option in &OPTIONS {
            if !host.register(option) {
                return Err("Slurm does not take the options --gpu-mem, --gpu-share, --gpu-class, --gpu-evictable and --gpu-unaligned: is the plugin in plugstack.conf twice?".into());
            }
        }
        match Arguments::parse(words) {
            Ok(arguments) => with(|state| state.arguments = Some(arguments)),
            // Where a step runs, the step fails for it, and nothing else of the node does.
            Err(error) if host.context() == Context::Remote => {
                with(|state| state.failure = Some(error));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    })
}

/// Takes the value of an option: at submission, and again where the step runs.
///
/// # Safety
/// Called by Slurm: `text` is null or ends with a NUL.
pub unsafe extern "C" fn on_option(option: c_int, text: *const c_char, _remote: c_int) -> c_int {
    hook("an option", || {
        let text = if text.is_null() {
            ""
        } else {
            // SAFETY: the caller's promise.
            unsafe { CStr::from_ptr(text) }
                .to_str()
                .map_err(|_| "an option of sublet's is no text".to_owned())?
        };
        with(|state| state.asked.take(option, text))
    })
}

/// `slurm_spank_init_post_opt`: the options are known.
///
/// # Safety
/// Called by Slurm as spank(7) says.
pub unsafe fn init_post_opt(
    spank: *mut c_void,
    _argc: c_int,
    _argv: *const *const c_char,
    _release: u32,
) -> c_int {
    let failed = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller's promise.
        let host = unsafe { Host::of(spank) }.ok_or("this process has no SPANK")?;
        if host.context() != Context::Remote {
            return Ok(());
        }
        register(&host)
    }));
    let failure = match failed {
        Ok(Ok(())) => None,
        Ok(Err(text)) => Some(text),
        Err(_) => Some("the registration has failed inside; this is a bug of sublet's".into()),
    };
    if let Some(failure) = failure {
        with(|state| state.failure = Some(failure));
    }
    GOOD
}

fn register(host: &Host) -> Result<(), String> {
    let (arguments, asked) = with(|state| (state.arguments.clone(), state.asked));
    // Said by `init`.
    let Some(arguments) = arguments else {
        return Ok(());
    };
    let unknown = |what: &str| format!("Slurm does not say the {what} of this step");
    let job = host.job_id().ok_or_else(|| unknown("job"))?;
    let step = host.step_id().ok_or_else(|| unknown("number"))?;
    let uid = host.uid().ok_or_else(|| unknown("user"))?;
    let list = host.var(step::node_list(step));
    let node = list
        .zip(host.node_id())
        .and_then(|(list, id)| step::node_of(&list, id));
    let node = node.unwrap_or_else(|| {
        let name = nix::unistd::gethostname().unwrap_or_default();
        name.to_string_lossy().into_owned()
    });
    control::check_name(&node).map_err(|_| format!("`{node}` is no name of a node"))?;
    let mut step = Step::of((job, step, uid), &node, |name| host.var(name));
    step.nodes = host.nodes().ok_or_else(|| unknown("number of nodes"))?;
    let Some(spec) = step.spec(&asked, &arguments)? else {
        return Ok(());
    };
    let driver = spec.driver.display().to_string();
    let registered = step::register(spec, arguments.runtime_dir(&step.node), &arguments)?;
    host::note(&format!("job {job} is `{}` on the arbiter", registered.job));
    with(|state| state.registered = Some((step, registered, driver)));
    Ok(())
}

/// `slurm_spank_task_init_privileged`: in the process that becomes a task, as root.
///
/// # Safety
/// Called by Slurm as spank(7) says.
pub unsafe fn task_init_privileged(
    _spank: *mut c_void,
    _argc: c_int,
    _argv: *const *const c_char,
    _release: u32,
) -> c_int {
    hook("task_init_privileged", || {
        with(|state| {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let arguments = state.arguments.as_ref();
            match arguments.and_then(|arguments| arguments.enforce.as_deref()) {
                Some(file) if state.registered.is_some() => enforce::preload(file),
                _ => Ok(()),
            }
        })
    })
}

/// `slurm_spank_task_init`: in the same process, as the user.
///
/// # Safety
/// Called by Slurm as spank(7) says.
pub unsafe fn task_init(
    spank: *mut c_void,
    _argc: c_int,
    _argv: *const *const c_char,
    release: u32,
) -> c_int {
    hook("task_init", || {
        // SAFETY: the caller's promise.
        let host = unsafe { Host::of(spank) }.ok_or("this process has no SPANK")?;
        with(|state| {
            let (Some((step, registered, driver)), Some(arguments)) =
                (&state.registered, &state.arguments)
            else {
                return Ok(());
            };
            let mut variables =
                step::variables(registered, arguments, driver, |name| host.var(name));
            variables.extend(step::step_gres(step, release));
            // The preload library writes to this file and no other, and only why a process of the
            // job cannot be governed.
            if let Ok(file) = nix::sys::stat::fstat(std::io::stderr()) {
                variables.push(("SUBLET_STDERR", format!("{}:{}", file.st_dev, file.st_ino)));
            }
            for (name, value) in variables {
                if !host.set(name, &value) {
                    return Err(format!("the task's {name} cannot be set"));
                }
            }
            Ok(())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_panic_leaves_a_hook_and_nothing_is_needed_of_slurm() {
        assert_eq!(hook("a test", || panic!("inside")), BAD);
        assert_eq!(hook("a test", || Ok(())), GOOD);
        // No process of Slurm's: refused, and nothing is touched.
        // SAFETY: a null handle is looked at by nobody, and there are no words.
        let refused = unsafe { init(std::ptr::null_mut(), 0, std::ptr::null(), 1) };
        assert_eq!(refused, BAD);
        // SAFETY: as above.
        let ignored = unsafe { init_post_opt(std::ptr::null_mut(), 0, std::ptr::null(), 1) };
        assert_eq!(ignored, GOOD, "said by the tasks");
        // SAFETY: as above.
        let said = unsafe { task_init_privileged(std::ptr::null_mut(), 0, std::ptr::null(), 1) };
        assert_eq!(said, BAD);
    }
}
