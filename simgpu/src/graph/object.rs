//! What programs leave to graphs to destroy.

use std::sync::Arc;

use shim_ffi::{CUhostFn, c_void};

use crate::driver::Driver;
use crate::exec::work::UserData;
use crate::lock::Mutex;
use crate::registry;

/// Something of the program's that graphs keep alive.
pub struct UserObject {
    /// Handle.
    pub id: u64,
    destroy: CUhostFn,
    data: UserData,
    references: Mutex<u32>,
}

impl UserObject {
    /// With `references` held by the program.
    pub fn create(
        driver: &Driver,
        destroy: CUhostFn,
        data: *mut c_void,
        references: u32,
    ) -> Arc<Self> {
        let object = Self {
            id: registry::fresh(),
            destroy,
            data: UserData(data),
            references: Mutex::new(references),
        };
        let object = Arc::new(object);
        driver.user_objects.insert(object.id, object.clone());
        object
    }

    /// Adds references.
    pub fn retain(&self, count: u32) {
        *self.references.lock() += count;
    }

    /// Drops references; the last one calls the program's destructor.
    pub fn release(&self, count: u32) {
        let last = {
            let mut references = self.references.lock();
            let before = *references;
            *references = before.saturating_sub(count);
            before > 0 && *references == 0
        };
        if let (true, Some(destroy)) = (last, self.destroy) {
            // SAFETY: the program gave the destructor to be called once with this pointer.
            unsafe { destroy(self.data.0) };
        }
    }
}
