//! Kernels, as functions of a context.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};

use crate::image::{EntryPoint, Param};
use crate::kernels::{self, Kernel};
use crate::lock::Mutex;
use crate::registry;

/// Registers of a thread where nothing is known: what PTX takes is decided when it is compiled.
const USUAL_REGISTERS: u32 = 32;

/// Block, dynamic shared memory and arguments of the next launch that names none of them
/// (`cuFuncSetBlockShape`, `cuFuncSetSharedSize`, `cuParamSet*`).
#[derive(Debug, Clone, Default)]
pub struct Prepared {
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub arguments: Vec<u8>,
}

/// A kernel, as a function of a context or a kernel of a library.
pub struct Function {
    /// Handle.
    pub id: u64,
    /// Name, NUL-terminated for `cuFuncGetName`.
    pub name: CString,
    /// Parameters, where known.
    pub params: Option<Vec<Param>>,
    /// What computes it here.
    pub host_kernel: Option<&'static Kernel>,
    /// Module or library that it is from.
    pub owner: u64,
    /// Static shared memory, in bytes.
    pub shared_bytes: u32,
    /// Largest block.
    pub max_threads: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Local memory of a thread, in bytes.
    pub local_bytes: u32,
    /// Constant memory of its module's own, in bytes.
    pub const_bytes: u32,
    /// `MAX_DYNAMIC_SHARED_SIZE_BYTES` as set by the program.
    pub dynamic_shared_limit: AtomicI32,
    /// Other attributes that the program set.
    pub attributes: Mutex<BTreeMap<u32, i32>>,
    /// What the launches of CUDA 2 use, set call by call.
    pub prepared: Mutex<Prepared>,
    /// The function of a library's kernel, once asked for; a kernel's own handle is valid in every
    /// context.
    pub function: Mutex<Option<u64>>,
    /// Whether it was launched: its code is loaded then.
    pub launched: AtomicBool,
}

impl Function {
    /// The kernel of an image, as a function of a module or library.
    pub fn new(entry: &EntryPoint, owner: u64) -> Arc<Self> {
        let host_kernel = kernels::find(&entry.name);
        let params = entry
            .params
            .clone()
            .or_else(|| host_kernel.map(|host_kernel| natural_layout(host_kernel.param_sizes)));
        Arc::new(Self {
            id: registry::fresh(),
            name: CString::new(entry.name.as_str()).unwrap_or_default(),
            params,
            host_kernel,
            owner,
            shared_bytes: entry.shared_bytes,
            max_threads: entry.max_threads.unwrap_or(1024).min(1024),
            registers: entry.registers.unwrap_or(USUAL_REGISTERS),
            local_bytes: entry.local_bytes,
            const_bytes: entry.const_bytes,
            dynamic_shared_limit: AtomicI32::new(48 << 10),
            attributes: Mutex::default(),
            prepared: Mutex::default(),
            function: Mutex::new(None),
            launched: AtomicBool::new(false),
        })
    }

    /// The same kernel under another handle.
    pub fn again(&self) -> Arc<Self> {
        Arc::new(Self {
            id: registry::fresh(),
            name: self.name.clone(),
            params: self.params.clone(),
            host_kernel: self.host_kernel,
            owner: self.owner,
            shared_bytes: self.shared_bytes,
            max_threads: self.max_threads,
            registers: self.registers,
            local_bytes: self.local_bytes,
            const_bytes: self.const_bytes,
            dynamic_shared_limit: AtomicI32::new(self.dynamic_shared_limit.load(Relaxed)),
            attributes: Mutex::new(self.attributes.lock().clone()),
            prepared: Mutex::default(),
            function: Mutex::new(None),
            launched: AtomicBool::new(false),
        })
    }
}

fn natural_layout(sizes: &[u8]) -> Vec<Param> {
    let mut offset = 0_usize;
    sizes
        .iter()
        .map(|bytes| {
            let bytes = *bytes as usize;
            offset = offset.next_multiple_of(bytes.max(1));
            let param = Param { offset, bytes };
            offset += bytes;
            param
        })
        .collect()
}
