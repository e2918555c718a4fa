//! Entries that are a jump, and where they go the first time.

use shim_ffi::{CUresult, SYMBOLS};

use super::track;
use crate::attachment::verdict::{insist, ours};
use crate::driver::real;
use crate::residency;

/// The code of an entry that touches nothing but the scratch register which the ABI leaves to
/// linkage: `$first`, then a jump to the real function.
macro_rules! jump {
    ($symbol:ident [$($first:literal)*] [$($operand:tt)*]) => {
        /// # Safety
        /// As the driver's function.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $symbol() -> CUresult {
            std::arch::naked_asm!(
                $($first,)*
                "mov rax, qword ptr [rip + {slots} + {offset}]",
                "test rax, rax",
                "je 2f",
                "jmp rax",
                "2: mov eax, {index}",
                "jmp {bind}",
                $($operand)*
                slots = sym addresses::SLOTS,
                offset = const Symbol::$symbol as usize * 8,
                index = const Symbol::$symbol as usize,
                bind = sym jumps::bind_and_jump,
            )
        }
    };
}

/// A jump to the real function.
macro_rules! forward {
    ($symbol:ident) => {
        jump! { $symbol [] [] }
    };
}

/// Where a forwarder goes the first time: finds the real function of row `eax` with every argument
/// register kept, and jumps there.
#[unsafe(naked)]
pub(super) unsafe extern "C" fn bind_and_jump() {
    std::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 128",
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "movups [rsp + 32], xmm2",
        "movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4",
        "movups [rsp + 80], xmm5",
        "movups [rsp + 96], xmm6",
        "movups [rsp + 112], xmm7",
        "mov edi, eax",
        "call {bind}",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]",
        "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]",
        "movups xmm7, [rsp + 112]",
        "add rsp, 128",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rbp",
        "jmp rax",
        bind = sym real::bind_index,
    )
}

/// A jump to the real function, but for tenants whose memory may be away: they pass the quiesce
/// gate. For up to six integer or pointer parameters, which travel in registers.
macro_rules! quiesced {
    ($symbol:ident) => {
        jump! {
            $symbol
            ["cmp byte ptr [rip + {active}], 0" "jne {quiesced}"]
            [active = sym residency::ACTIVE, quiesced = sym jumps::through_quiesce_gate::<{ Symbol::$symbol as usize }>,]
        }
    };
}

/// The real function of a row, called inside the quiesce gate.
pub(super) extern "C-unwind" fn through_quiesce_gate<const INDEX: usize>(
    a0: usize,
    a1: usize,
    a2: usize,
    a3: usize,
    a4: usize,
    a5: usize,
) -> CUresult {
    // PANIC: rows of the table alone come here.
    let symbol = SYMBOLS[INDEX];
    let _pass = match ours(symbol, residency::pass) {
        Ok(Ok(pass)) => Some(pass),
        Ok(Err(status)) => return status,
        Err(_) => None,
    };
    let address = real::address(symbol);
    let mut words = [a0, a1, a2, a3, a4, a5];
    if let Ok(Some((at, handle))) = insist(symbol, || track::translated(symbol.traits(), &words)) {
        words[at] = handle;
    }
    let [a0, a1, a2, a3, a4, a5] = words;
    // SAFETY: the driver's function takes at most six words, each in its register; the caller's own
    // arguments.
    unsafe {
        let function: unsafe extern "C-unwind" fn(
            usize,
            usize,
            usize,
            usize,
            usize,
            usize,
        ) -> CUresult = std::mem::transmute(address);
        function(a0, a1, a2, a3, a4, a5)
    }
}
