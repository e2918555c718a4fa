//! What nodes of graphs do, and the memory of those that allocate.

use std::sync::Arc;

use shim_ffi::{CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUfunction, CUhostFn, c_void};

use super::{Conditional, Graph, Result};
use crate::driver::Driver;
use crate::exec::work::{Copy, Fill, KernelLaunch, UserData, Work};
use crate::memory::pool::Pool;

/// Memory that an allocation node owns. It lives as long as a graph that has the node, and where a
/// launch has given it to the program, until that frees it.
pub struct Block {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    pool: Arc<Pool>,
    driver: &'static Driver,
}

impl Block {
    /// Takes memory for a node.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`, or `INVALID_VALUE` for no bytes.
    pub fn take(
        driver: &'static Driver,
        device: usize,
        context: u64,
        bytes: u64,
    ) -> Result<Arc<Self>> {
        let pool = driver.graph_pools[device].clone();
        let address = pool.alloc(&driver.memory, &driver.device_state, context, bytes)?;
        driver.memory.own_by_graph(address);
        Ok(Arc::new(Self {
            address,
            bytes,
            pool,
            driver,
        }))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.driver.given_by_graphs.lock().remove(&self.address) {
            self.driver.memory.own_by_program(self.address);
            return;
        }
        if let Ok(region) = self
            .driver
            .memory
            .free(&self.driver.device_state, self.address)
        {
            self.pool
                .give_back(&self.driver.memory, &self.driver.device_state, &region);
        }
    }
}

/// What a node does.
#[derive(Clone)]
pub enum Action {
    /// A kernel, with the handle that the program gave.
    Kernel(Box<KernelLaunch>, CUfunction),
    /// A copy; the parameters as given, where it was not captured.
    Copy(Option<Box<Copy>>, Box<CopyParams>),
    /// A fill.
    Fill(Fill),
    /// A host function.
    Host(CUhostFn, UserData),
    /// Another graph.
    Graph(Arc<Graph>),
    /// Nothing.
    Empty,
    /// Waits for an event's last record.
    Wait(u64),
    /// Records an event.
    Record(u64),
    /// Allocates.
    Alloc(Arc<Block>),
    /// Frees what an allocation node gave.
    Free(u64),
    /// Memory operations.
    Operations(Vec<Work>),
    /// Other graphs, by a condition.
    Conditional(Arc<Conditional>),
}

/// A copy node's parameters.
#[derive(Clone, Copy)]
pub struct CopyParams(pub CUDA_MEMCPY3D);

// SAFETY: its pointers are addresses for copies; nothing here follows them.
unsafe impl Send for CopyParams {}
// SAFETY: as above.
unsafe impl Sync for CopyParams {}

impl Action {
    /// `CUgraphNodeType`.
    pub fn kind(&self) -> u32 {
        match self {
            Self::Kernel(..) => 0,
            Self::Copy(..) => 1,
            Self::Fill(_) => 2,
            Self::Host(..) => 3,
            Self::Graph(_) => 4,
            Self::Empty => 5,
            Self::Wait(_) => 6,
            Self::Record(_) => 7,
            Self::Alloc(_) => 10,
            Self::Free(_) => 11,
            Self::Operations(_) => 12,
            Self::Conditional(_) => 13,
        }
    }

    /// What a stream would have done, as a node.
    pub fn of(work: Work) -> Self {
        match work {
            Work::Kernel(launch) => {
                let function = CUfunction(launch.function.id as *mut c_void);
                Self::Kernel(launch, function)
            }
            Work::Copy(copy) => {
                let params = describe(&copy);
                Self::Copy(Some(copy), Box::new(CopyParams(params)))
            }
            Work::Fill(fill) => Self::Fill(fill),
            Work::Host(function, data) => Self::Host(function, data),
            Work::PoolFree { address } => Self::Free(address),
            work @ (Work::Write { .. } | Work::Await { .. }) => Self::Operations(vec![work]),
            Work::Callback(..) | Work::Record(_) | Work::Wait(_) => Self::Empty,
        }
    }
}

fn describe(copy: &Copy) -> CUDA_MEMCPY3D {
    const UNIFIED: shim_ffi::CUmemorytype = shim_ffi::CUmemorytype(4);
    let rows = |slice: u64, pitch: u64| slice.checked_div(pitch).unwrap_or(0) as usize;
    CUDA_MEMCPY3D {
        srcMemoryType: UNIFIED,
        srcDevice: shim_ffi::CUdeviceptr(copy.from.address),
        srcPitch: copy.from.pitch as usize,
        srcHeight: rows(copy.from.slice, copy.from.pitch),
        dstMemoryType: UNIFIED,
        dstDevice: shim_ffi::CUdeviceptr(copy.to.address),
        dstPitch: copy.to.pitch as usize,
        dstHeight: rows(copy.to.slice, copy.to.pitch),
        WidthInBytes: copy.width as usize,
        Height: copy.height as usize,
        Depth: copy.depth as usize,
        ..CUDA_MEMCPY3D::default()
    }
}

/// The parameters of a fill node.
pub fn fill_params(fill: &Fill) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS {
        dst: shim_ffi::CUdeviceptr(fill.address),
        pitch: fill.pitch as usize,
        value: fill.value,
        elementSize: fill.element,
        width: fill.width as usize,
        height: fill.height as usize,
    }
}
