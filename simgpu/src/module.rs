//! Modules, libraries, kernels and functions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;

use crate::lock::Mutex;
use shim_ffi::CUresult;

use crate::context::Context;
use crate::driver::Driver;
use crate::image::{EntryPoint, Image, Param, Variable};
use crate::kernels::{self, Kernel};
use crate::memory::Kind;
use crate::registry;

type Result<T> = std::result::Result<T, CUresult>;

/// A kernel, as a function of a context or a kernel of a library.
pub struct Function {
    /// Handle.
    pub id: u64,
    /// Name, NUL-terminated for `cuFuncGetName`.
    pub name: std::ffi::CString,
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
    /// `MAX_DYNAMIC_SHARED_SIZE_BYTES` as set by the program.
    pub dynamic_shared_limit: AtomicI32,
    /// Other attributes that the program set.
    pub attributes: Mutex<BTreeMap<u32, i32>>,
    /// The function of a library's kernel, once asked for; a kernel's own handle is valid in every
    /// context.
    pub function: Mutex<Option<u64>>,
}

impl Function {
    fn new(entry: &EntryPoint, owner: u64) -> Arc<Self> {
        let host_kernel = kernels::find(&entry.name);
        let params = entry
            .params
            .clone()
            .or_else(|| host_kernel.map(|host_kernel| natural_layout(host_kernel.param_sizes)));
        Arc::new(Self {
            id: registry::fresh(),
            name: std::ffi::CString::new(entry.name.as_str()).unwrap_or_default(),
            params,
            host_kernel,
            owner,
            shared_bytes: entry.shared_bytes,
            max_threads: entry.max_threads.unwrap_or(1024).min(1024),
            dynamic_shared_limit: AtomicI32::new(48 << 10),
            attributes: Mutex::default(),
            function: Mutex::new(None),
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
            dynamic_shared_limit: AtomicI32::new(
                self.dynamic_shared_limit
                    .load(std::sync::atomic::Ordering::Relaxed),
            ),
            attributes: Mutex::new(self.attributes.lock().clone()),
            function: Mutex::new(None),
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

/// A module of a context.
pub struct Module {
    /// Handle.
    pub id: u64,
    /// Context.
    pub context: u64,
    /// Kernels by name.
    pub functions: BTreeMap<String, Arc<Function>>,
    /// Variables by name: address and bytes.
    pub globals: BTreeMap<String, (u64, u64)>,
}

/// A library: valid in every context, its variables exist once per context.
pub struct Library {
    /// Handle.
    pub id: u64,
    /// Kernels by name.
    pub kernels: BTreeMap<String, Arc<Function>>,
    /// Variables, not placed.
    pub variables: Vec<Variable>,
    /// Placed variables by context and name: address and bytes.
    pub globals: Mutex<BTreeMap<(u64, String), (u64, u64)>>,
    /// Modules of this library by context (`cuLibraryGetModule`).
    pub modules: Mutex<BTreeMap<u64, u64>>,
}

impl Module {
    /// Loads an image into a context.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` for its variables.
    pub fn load(driver: &Driver, context: &Context, image: &Image) -> Result<Arc<Self>> {
        let id = registry::fresh();
        let mut globals = BTreeMap::new();
        for variable in &image.variables {
            match place(driver, context, variable) {
                Ok(placed) => {
                    globals.insert(variable.name.clone(), placed);
                }
                Err(status) => {
                    globals.values().for_each(|(address, _)| {
                        drop(driver.memory.free(&driver.device_state, *address))
                    });
                    return Err(status);
                }
            }
        }
        let functions: BTreeMap<_, _> = image
            .entries
            .iter()
            .map(|entry| (entry.name.clone(), Function::new(entry, id)))
            .collect();
        let module = Arc::new(Self {
            id,
            context: context.id,
            functions,
            globals,
        });
        for function in module.functions.values() {
            driver.functions.insert(function.id, function.clone());
        }
        driver.modules.insert(id, module.clone());
        Ok(module)
    }

    /// Takes the module's functions and variables away. Its handle is the caller's to remove.
    pub fn unload(&self, driver: &Driver) {
        for function in self.functions.values() {
            driver.functions.remove(function.id);
        }
        for (address, _) in self.globals.values() {
            // A context that went first took them along.
            let _ = driver.memory.free(&driver.device_state, *address);
        }
    }
}

impl Library {
    /// Makes a library of an image.
    pub fn load(driver: &Driver, image: Image) -> Arc<Self> {
        let id = registry::fresh();
        let kernels: BTreeMap<_, _> = image
            .entries
            .iter()
            .map(|entry| (entry.name.clone(), Function::new(entry, id)))
            .collect();
        let library = Arc::new(Self {
            id,
            kernels,
            variables: image.variables,
            globals: Mutex::default(),
            modules: Mutex::default(),
        });
        for kernel in library.kernels.values() {
            driver.kernels.insert(kernel.id, kernel.clone());
        }
        driver.libraries.insert(id, library.clone());
        library
    }

    /// Address and bytes of a variable in a context.
    ///
    /// # Errors
    /// `NOT_FOUND`, or `OUT_OF_MEMORY` when it has to be placed and there is no space.
    pub fn global(&self, driver: &Driver, context: &Context, name: &str) -> Result<(u64, u64)> {
        let mut globals = self.globals.lock();
        if let Some(placed) = globals.get(&(context.id, name.to_owned())) {
            return Ok(*placed);
        }
        let variable = self
            .variables
            .iter()
            .find(|variable| variable.name == name)
            .ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        let placed = place(driver, context, variable)?;
        globals.insert((context.id, name.to_owned()), placed);
        Ok(placed)
    }

    /// The context function of a kernel.
    pub fn function(driver: &Driver, kernel: &Function) -> u64 {
        let mut function = kernel.function.lock();
        *function.get_or_insert_with(|| {
            let function = kernel.again();
            driver.functions.insert(function.id, function.clone());
            function.id
        })
    }

    /// Takes the library's kernels, functions and variables away.
    pub fn unload(&self, driver: &Driver) {
        for kernel in self.kernels.values() {
            driver.kernels.remove(kernel.id);
            if let Some(function) = *kernel.function.lock() {
                driver.functions.remove(function);
            }
        }
        for (address, _) in self.globals.lock().values() {
            let _ = driver.memory.free(&driver.device_state, *address);
        }
        for module in self.modules.lock().values() {
            if let Some(module) = driver.modules.remove(*module) {
                module.unload(driver);
            }
        }
    }
}

fn place(driver: &Driver, context: &Context, variable: &Variable) -> Result<(u64, u64)> {
    let bytes = variable.bytes.max(1);
    let address = driver.memory.alloc(
        &driver.device_state,
        context.device,
        context.id,
        bytes,
        Kind::Global,
    )?;
    if let Some(target) = driver.memory.translate(address, bytes, None) {
        let initial = &variable.initial[..variable.initial.len().min(bytes as usize)];
        // SAFETY: translated for all of the variable's bytes, and nobody else knows the address
        // yet.
        unsafe {
            target.write_bytes(0, bytes as usize);
            target.copy_from_nonoverlapping(initial.as_ptr(), initial.len());
        }
    }
    Ok((address, variable.bytes))
}
