//! What processes of the job hand to each other: descriptors of exported handles, and addresses for
//! other processes to open.
//!
//! One pair of sockets for all of them, made by the crew: everybody writes into one end and takes
//! from the other. What lies there when nothing moves is held by nobody.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;

use shim_ffi::CUipcMemHandle;

/// A letter.
pub enum Letter {
    /// Physical memory of so many bytes.
    Physical { descriptor: OwnedFd, bytes: u64 },
    /// A plain allocation.
    Address(CUipcMemHandle),
}

/// The two ends, as descriptors that child processes inherit.
pub struct Post {
    to: UnixDatagram,
    from: UnixDatagram,
}

const LENGTH: usize = 72;
const PHYSICAL: u64 = 1;
const ADDRESS: u64 = 2;

/// Space for one descriptor in a control message, aligned as its header must be.
#[repr(C, align(8))]
struct Control([u8; 24]);

impl Post {
    /// A new one.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> std::io::Result<Self> {
        let (to, from) = UnixDatagram::pair()?;
        let post = Self { to, from };
        for end in [&post.to, &post.from] {
            end.set_nonblocking(true)?;
            // SAFETY: a descriptor of ours; children shall have it.
            unsafe { libc::fcntl(end.as_raw_fd(), libc::F_SETFD, 0) };
        }
        Ok(post)
    }

    /// Its ends as words of a command line.
    pub fn words(&self) -> [String; 2] {
        [&self.to, &self.from].map(|end| end.as_raw_fd().to_string())
    }

    /// From the words, in a child.
    ///
    /// # Errors
    /// They are no descriptors.
    pub fn from_words(to: &str, from: &str) -> std::io::Result<Self> {
        let end = |word: &str| {
            let fd: RawFd = word
                .parse()
                .map_err(|_| std::io::Error::other(format!("{word} is no descriptor")))?;
            // SAFETY: inherited for this and used by nobody else in this process.
            Ok::<_, std::io::Error>(unsafe { UnixDatagram::from_raw_fd(fd) })
        };
        Ok(Self {
            to: end(to)?,
            from: end(from)?,
        })
    }

    /// Puts physical memory in. The descriptor stays the caller's. False where the box is full.
    pub fn put_physical(&self, descriptor: RawFd, bytes: u64) -> bool {
        let mut letter = [0u8; LENGTH];
        letter[..8].copy_from_slice(&PHYSICAL.to_ne_bytes());
        letter[8..16].copy_from_slice(&bytes.to_ne_bytes());
        self.send(&mut letter, Some(descriptor))
    }

    /// Puts an address in. False where the box is full.
    pub fn put_address(&self, handle: &CUipcMemHandle) -> bool {
        let mut letter = [0u8; LENGTH];
        letter[..8].copy_from_slice(&ADDRESS.to_ne_bytes());
        // SAFETY: 64 plain bytes.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const *handle).cast::<u8>(), 64) };
        letter[8..].copy_from_slice(bytes);
        self.send(&mut letter, None)
    }

    fn send(&self, letter: &mut [u8; LENGTH], descriptor: Option<RawFd>) -> bool {
        let mut part = libc::iovec {
            iov_base: letter.as_mut_ptr().cast(),
            iov_len: LENGTH,
        };
        let mut control = Control([0; 24]);
        // SAFETY: all zeros is an empty header.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        // SAFETY: the control buffer has space for one descriptor; the message outlives the call.
        unsafe {
            if let Some(descriptor) = descriptor {
                message.msg_control = (&raw mut control).cast();
                message.msg_controllen = libc::CMSG_SPACE(4) as usize;
                let head = libc::CMSG_FIRSTHDR(&raw const message);
                (*head).cmsg_level = libc::SOL_SOCKET;
                (*head).cmsg_type = libc::SCM_RIGHTS;
                (*head).cmsg_len = libc::CMSG_LEN(4) as usize;
                libc::CMSG_DATA(head).cast::<i32>().write(descriptor);
            }
            libc::sendmsg(self.to.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT) >= 0
        }
    }

    /// Takes a letter out, if there is one.
    pub fn take(&self) -> Option<Letter> {
        let mut letter = [0u8; LENGTH];
        let mut part = libc::iovec {
            iov_base: letter.as_mut_ptr().cast(),
            iov_len: LENGTH,
        };
        let mut control = Control([0; 24]);
        // SAFETY: all zeros is an empty header; buffers outlive the call; what the kernel wrote is
        // read by its own macros.
        let (read, descriptor) = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = (&raw mut control).cast();
            message.msg_controllen = size_of::<Control>();
            let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
            let read = libc::recvmsg(self.from.as_raw_fd(), &raw mut message, flags);
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            let descriptor = (read >= 0 && !head.is_null())
                .then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(head).cast::<i32>().read()));
            (read, descriptor)
        };
        if usize::try_from(read) != Ok(LENGTH) {
            return None;
        }
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| letter[at + byte]));
        match (word(0), descriptor) {
            (PHYSICAL, Some(descriptor)) => Some(Letter::Physical {
                descriptor,
                bytes: word(8),
            }),
            (ADDRESS, None) => {
                let mut handle = CUipcMemHandle::default();
                // SAFETY: 64 plain bytes.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        letter[8..].as_ptr(),
                        (&raw mut handle).cast::<u8>(),
                        64,
                    );
                }
                Some(Letter::Address(handle))
            }
            _ => None,
        }
    }
}
