//! Transparent handles and scalars of the driver API.

use core::ffi::c_void;

macro_rules! handles {
    ($($name:ident)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: an opaque driver handle. Never dereferenced on our side.")]
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(pub *mut c_void);

        impl $name {
            /// The null handle.
            pub const NULL: Self = Self(core::ptr::null_mut());

            /// True for the null handle.
            pub fn is_null(self) -> bool {
                self.0.is_null()
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::NULL
            }
        }

        // SAFETY: a handle is a number to us; the driver's own rules say from which threads it may
        // be used.
        unsafe impl Send for $name {}
        // SAFETY: as above; sharing the number shares nothing else.
        unsafe impl Sync for $name {}

        const _: () = assert!(size_of::<$name>() == size_of::<*mut c_void>());
    )*};
}

handles! {
    CUarray CUasyncCallbackHandle CUcheckpointOperationHandle CUcontext CUcoredumpCallbackHandle CUdevResourceDesc
    CUevent CUexternalMemory CUexternalSemaphore CUfunction CUgraph CUgraphExec CUgraphNode CUgraphicsResource
    CUgreenCtx CUkernel CUlibrary CUlinkState CUlogsCallbackHandle CUmemoryPool CUmipmappedArray CUmodule CUstream
    CUsurfref CUtexref CUuserObject
}

impl CUstream {
    /// `CU_STREAM_LEGACY`: the legacy default stream, explicitly.
    pub const LEGACY: Self = Self(core::ptr::without_provenance_mut(1));
    /// `CU_STREAM_PER_THREAD`: the calling thread's default stream, explicitly.
    pub const PER_THREAD: Self = Self(core::ptr::without_provenance_mut(2));
}

macro_rules! scalars {
    ($($(#[$doc:meta])* $name:ident: $repr:ty;)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub $repr);
    )*};
}

scalars! {
    /// Address in a device's virtual address space.
    CUdeviceptr: u64;
    /// Address of the first, 32-bit ABI.
    CUdeviceptr_v1: u32;
    /// Device ordinal.
    CUdevice: i32;
    /// Handle of physical memory made by `cuMemCreate`.
    CUmemGenericAllocationHandle: u64;
    /// Handle of a graph's conditional node.
    CUgraphConditionalHandle: u64;
    /// Texture object.
    CUtexObject: u64;
    /// Surface object.
    CUsurfObject: u64;
    /// Id of a logical endpoint.
    CUlogicalEndpointId: u64;
    /// Position in the driver's error log.
    CUlogIterator: u32;
    /// Kind of a device resource.
    CUdevResourceType: u32;
}

/// Attribute id of a launch, a kernel node or a stream: one enumeration under three names.
pub type CUkernelNodeAttrID = crate::CUlaunchAttributeID;
/// See [`CUkernelNodeAttrID`].
pub type CUstreamAttrID = crate::CUlaunchAttributeID;

/// Host function enqueued in a stream.
pub type CUhostFn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;
/// Callback of `cuStreamAddCallback`.
pub type CUstreamCallback =
    Option<unsafe extern "C" fn(stream: CUstream, status: crate::CUresult, user_data: *mut c_void)>;
/// Dynamic shared memory of a block size, for the occupancy calculator.
pub type CUoccupancyB2DSize = Option<unsafe extern "C" fn(block_size: i32) -> usize>;
/// Callback of the driver's asynchronous notifications.
pub type CUasyncCallback =
    Option<unsafe extern "C" fn(*mut c_void, *mut c_void, CUasyncCallbackHandle)>;
/// Callback around a core dump.
pub type CUcoredumpStatusCallback = Option<unsafe extern "C" fn(*mut c_void, i32, CUdevice)>;
/// Callback of the driver's error log.
pub type CUlogsCallback =
    Option<unsafe extern "C" fn(*mut c_void, u32, *mut core::ffi::c_char, usize)>;
/// Callback of a graph recapture; its parameters are not ours to know.
pub type CUgraphRecaptureCallback = Option<unsafe extern "C" fn(*mut c_void)>;
