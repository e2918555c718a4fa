//! Who asks over TCP: somebody on any host who holds a token. What the token's file says of it is
//! all that is known.

/// The holder of a token.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bearer {
    /// What the token's file calls it.
    pub name: String,
    /// What it may do.
    pub role: Role,
}

/// What a token is good for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Reads what everybody on the host may read.
    ReadOnly,
    /// Does what a user of this number may do.
    User(u32),
    /// Does what the arbiter's own user may do.
    Operator,
}
