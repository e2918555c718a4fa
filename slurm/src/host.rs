//! The process that has loaded us: the functions of SPANK that it has, looked up by name, so that
//! this crate links nothing of Slurm's.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use nix::libc;

/// Where a hook runs (`spank_context`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Context {
    /// `srun`.
    Local,
    /// `slurmstepd`.
    Remote,
    /// `sbatch` or `salloc`.
    Allocator,
    /// Elsewhere: `slurmd`, a prolog.
    Other,
}

/// `struct spank_option`.
#[repr(C)]
#[derive(Debug)]
pub struct SpankOption {
    pub name: *const c_char,
    pub arginfo: *const c_char,
    pub usage: *const c_char,
    pub has_arg: c_int,
    pub val: c_int,
    pub callback: Option<unsafe extern "C" fn(c_int, *const c_char, c_int) -> c_int>,
}

// SAFETY: the pointers lead to constants.
unsafe impl Sync for SpankOption {}

/// Items of `spank_get_item`.
const JOB_UID: c_int = 0;
const JOB_ID: c_int = 2;
const JOB_STEP_ID: c_int = 3;
const JOB_NODES: c_int = 4;
const JOB_NODE_ID: c_int = 5;
/// Longest value of a variable that is looked at.
const VALUE_BYTES: usize = 64 << 10;

type GetContext = unsafe extern "C" fn() -> c_int;
type RegisterOption = unsafe extern "C" fn(*mut c_void, *const SpankOption) -> c_int;
type GetItem = unsafe extern "C" fn(*mut c_void, c_int, ...) -> c_int;
type GetEnv = unsafe extern "C" fn(*mut c_void, *const c_char, *mut c_char, c_int) -> c_int;
type SetEnv = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char, c_int) -> c_int;
type Log = unsafe extern "C" fn(*const c_char, ...);

/// The loading process, during one hook.
#[derive(Debug)]
pub struct Host {
    spank: *mut c_void,
    context: GetContext,
    register_option: RegisterOption,
    get_item: GetItem,
    get_env: GetEnv,
    set_env: SetEnv,
}

/// A symbol of this process.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends with a NUL.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

impl Host {
    /// The process, with Slurm's handle for this hook. `None`: it is none of Slurm's.
    ///
    /// # Safety
    /// `spank` is the handle that Slurm has just given to a hook, and the hook is still running.
    pub unsafe fn of(spank: *mut c_void) -> Option<Self> {
        let context = symbol(c"spank_context")?;
        let register_option = symbol(c"spank_option_register")?;
        let get_item = symbol(c"spank_get_item")?;
        let get_env = symbol(c"spank_getenv")?;
        let set_env = symbol(c"spank_setenv")?;
        // SAFETY: these are the types of these functions in spank.h, in every release since 2.x.
        unsafe {
            Some(Self {
                spank,
                context: std::mem::transmute::<*mut c_void, GetContext>(context),
                register_option: std::mem::transmute::<*mut c_void, RegisterOption>(
                    register_option,
                ),
                get_item: std::mem::transmute::<*mut c_void, GetItem>(get_item),
                get_env: std::mem::transmute::<*mut c_void, GetEnv>(get_env),
                set_env: std::mem::transmute::<*mut c_void, SetEnv>(set_env),
            })
        }
    }

    /// Where this hook runs.
    pub fn context(&self) -> Context {
        // SAFETY: it takes nothing.
        match unsafe { (self.context)() } {
            1 => Context::Local,
            2 => Context::Remote,
            3 => Context::Allocator,
            _ => Context::Other,
        }
    }

    /// Adds an option; false where Slurm does not take it.
    pub fn register(&self, option: &'static SpankOption) -> bool {
        // SAFETY: Slurm copies what the option leads to.
        unsafe { (self.register_option)(self.spank, option) == 0 }
    }

    fn number(&self, item: c_int) -> Option<u32> {
        let mut number = 0u32;
        // SAFETY: for these items Slurm writes 32 bits.
        let error = unsafe { (self.get_item)(self.spank, item, &raw mut number) };
        (error == 0).then_some(number)
    }

    /// The job's user.
    pub fn uid(&self) -> Option<u32> {
        self.number(JOB_UID)
    }

    /// The job.
    pub fn job_id(&self) -> Option<u32> {
        self.number(JOB_ID)
    }

    /// Its step.
    pub fn step_id(&self) -> Option<u32> {
        self.number(JOB_STEP_ID)
    }

    /// How many nodes the step has.
    pub fn nodes(&self) -> Option<u32> {
        self.number(JOB_NODES)
    }

    /// Which of the step's nodes this is.
    pub fn node_id(&self) -> Option<u32> {
        self.number(JOB_NODE_ID)
    }

    /// A variable of the job; `None` where it has none, or one that is no text or too long.
    pub fn var(&self, name: &str) -> Option<String> {
        let name = CString::new(name).ok()?;
        let mut value: Vec<u8> = vec![0; VALUE_BYTES];
        // SAFETY: the buffer has as many bytes as are said.
        let error = unsafe {
            // CAST: 65536 fits.
            (self.get_env)(
                self.spank,
                name.as_ptr(),
                value.as_mut_ptr().cast(),
                VALUE_BYTES as c_int,
            )
        };
        if error != 0 {
            return None;
        }
        let text = CStr::from_bytes_until_nul(&value).ok()?;
        let text = text.to_str().ok()?;
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// Sets a variable of the job's tasks; false where that fails.
    pub fn set(&self, name: &str, value: &str) -> bool {
        let (Ok(name), Ok(value)) = (CString::new(name), CString::new(value)) else {
            return false;
        };
        // SAFETY: both are texts that end with a NUL, and Slurm copies them.
        unsafe { (self.set_env)(self.spank, name.as_ptr(), value.as_ptr(), 1) == 0 }
    }
}

/// Says a line to the user, or in the daemon's log: where Slurm's messages of this process go.
pub fn say(text: &str) {
    log(c"slurm_error", &format!("sublet: {text}"));
}

/// The same for what is no error.
pub fn note(text: &str) {
    log(c"slurm_verbose", &format!("sublet: {text}"));
}

fn log(function: &CStr, text: &str) {
    let Some(function) = symbol(function) else {
        return;
    };
    let text: String = text.chars().filter(|c| *c != '\0').collect();
    let Ok(text) = CString::new(text) else { return };
    // SAFETY: slurm_error and slurm_verbose take a format and what it names, here one text.
    unsafe {
        let function = std::mem::transmute::<*mut c_void, Log>(function);
        function(c"%s".as_ptr(), text.as_ptr());
    }
}
