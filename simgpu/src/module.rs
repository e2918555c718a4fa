//! Modules, libraries, and what modules are linked from.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::lock::Mutex;
use shim_ffi::CUresult;

use crate::context::Context;
use crate::driver::Driver;
use crate::function::Function;
use crate::image::{Image, Variable};
use crate::memory::Kind;
use crate::registry;

type Result<T> = std::result::Result<T, CUresult>;

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

/// PTX that is being put together.
pub struct Link {
    pub parts: Mutex<Vec<u8>>,
    /// What the program was given; it lives as long as the link state.
    pub complete: Mutex<Option<Box<[u8]>>>,
}
