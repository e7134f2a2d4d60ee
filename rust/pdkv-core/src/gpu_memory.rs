//! What becomes of memory of GPUs on one way to a peer.

/// How a way moves memory of GPUs, wherever it lies, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GpuMemory {
    /// Straight from and to it.
    Direct,
    /// Through memory of a host, where every byte rests on its way.
    Staged,
    /// Only a try tells, and none has ended.
    Untried,
    /// Not at all.
    Refused,
}

impl GpuMemory {
    /// The name that users see.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Untried => "untried",
            Self::Refused => "refused",
        }
    }

    /// On a way that moves it: staged, unless the way is `direct`.
    pub const fn moved(direct: bool) -> Self {
        if direct { Self::Direct } else { Self::Staged }
    }
}
