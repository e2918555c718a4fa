//! The one table, with the shape of every argument.

use std::ffi::CStr;

use shim_ffi::*;

/// Bytes and nature of one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Size in bytes; above 8 for a structure that is passed by value.
    pub bytes: usize,
    /// A pointer that a hook may follow.
    pub pointer: bool,
}

macro_rules! shapes {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $shape:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $traits:tt $signature:tt;)*) => {
        static SHAPES: &[Option<&[Parameter]>] = &[$(shape!($signature),)*];
    };
}
macro_rules! shape {
    (_) => { None };
    (($($arg:ident: $ty:ty),*)) => {
        Some(&[$(Parameter {
            bytes: size_of::<$ty>(),
            pointer: stringify!($ty).as_bytes()[0] == b'*',
        }),*])
    };
}
shim_ffi::driver_table!(shapes);

/// Parameters of `symbol` where the table spells them out.
pub fn parameters(symbol: Symbol) -> Option<&'static [Parameter]> {
    SHAPES[symbol as usize]
}

/// Name of `symbol`.
pub fn name(symbol: Symbol) -> &'static str {
    symbol.entry().name()
}

/// The symbol of this name.
///
/// # Panics
/// When there is none.
#[track_caller]
pub fn symbol(name: &str) -> Symbol {
    Symbol::from_name(name.as_bytes()).unwrap_or_else(|| panic!("{name} is not in the table"))
}

/// All symbols with this action.
pub fn with_action(action: Action) -> impl Iterator<Item = Symbol> {
    SYMBOLS
        .iter()
        .copied()
        .filter(move |symbol| symbol.entry().action == action)
}

/// One request of `cuGetProcAddress` and the symbol that a real driver answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Base name asked for.
    pub base: String,
    /// CUDA version asked for.
    pub version: u32,
    /// Flags.
    pub flags: u64,
    /// What the driver answered.
    pub symbol: Symbol,
}

/// Every request that frameworks were seen to make (`shim-ffi/data/framework-symbols.csv`).
pub fn framework_requests() -> Vec<Request> {
    let text = include_str!("../../shim-ffi/data/framework-symbols.csv");
    let mut requests = Vec::new();
    for line in text.lines().skip(1) {
        let mut fields = line.split(',');
        let (Some(name), Some(how)) = (fields.next(), fields.next()) else {
            continue;
        };
        let Some(symbol) = Symbol::from_name(name.as_bytes()) else {
            continue;
        };
        for request in how
            .trim_matches('"')
            .split(" | ")
            .filter_map(|how| how.strip_prefix("cuGetProcAddress_v2("))
        {
            let Some((request, _)) = request.split_once(')') else {
                continue;
            };
            let parts: Vec<&str> = request.split(';').collect();
            let [base, versions, flags] = parts[..] else {
                continue;
            };
            for version in versions.trim_start_matches("v=").split('/') {
                requests.push(Request {
                    base: base.to_owned(),
                    version: version.parse().expect("a version"),
                    flags: flags.trim_start_matches("flags=").parse().expect("flags"),
                    symbol,
                });
            }
        }
    }
    requests
}

/// The exported name with its terminating zero.
pub fn c_name(symbol: Symbol) -> &'static CStr {
    symbol.entry().symbol
}
