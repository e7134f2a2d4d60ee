//! How the bytes of a copy go, decided from where they lie: by a kernel, with how much of the GPU, or by the driver's batched copies.
//!
//! The GPU belongs to an LLM engine. A copy inside its memory is over soonest with all of it; one over a link is held up by the link, and
//! more blocks than fill it would only keep others from their multiprocessors.

use super::host_paths::{HostDirection, HostPath, HostPaths, LINK_BLOCKS};
use super::reach::Side;
use crate::kernels::Wishes;

/// Blocks that a kernel gets for a copy from or to another GPU: 64 of them have 2 MiB under way, more than an NVLink of today holds.
const PEER_BLOCKS: u32 = 64;
/// The driver is asked for each piece, by a thread that others wait for too: more pieces than these are the kernel's.
const MOST_PIECES: u64 = 1 << 16;

/// How the bytes of a copy go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// By a kernel.
    Kernel(Wishes),
    /// By the driver's batched copies.
    Batch,
}

impl Route {
    /// The route of `bytes` in so many pieces. `paths` is what was measured between the host and the GPU, if it was; `bulk` from which size of pieces
    /// on the bulk engine was found to be faster inside the GPU, if it was.
    pub(super) fn of(
        src: &[Side],
        dst: &[Side],
        [bytes, pieces]: [u64; 2],
        paths: Option<HostPaths>,
        bulk: Option<u64>,
    ) -> Self {
        let any = |side| src.iter().chain(dst).any(|at| *at == side);
        let most_blocks = if any(Side::Host) {
            if let (Some(direction), Some(paths)) = (direction(src, dst), paths)
                && pieces <= MOST_PIECES
                && paths.choose(direction, bytes, pieces) == HostPath::Batch
            {
                return Self::Batch;
            }
            Some(LINK_BLOCKS)
        } else {
            any(Side::Beside).then_some(PEER_BLOCKS)
        };
        Self::Kernel(Wishes {
            most_blocks,
            // Over a link few blocks are enough, and nobody has seen the bulk engine on memory of the host or of another GPU.
            bulk: bulk.filter(|_| inside(src, dst)),
            ..Wishes::default()
        })
    }
}

/// In which direction bytes go between the host and this very GPU, which is what was measured; `None` where sides are mixed, or of another GPU.
fn direction(src: &[Side], dst: &[Side]) -> Option<HostDirection> {
    let all = |of: &[Side], side| of.iter().all(|at| *at == side);
    if all(src, Side::Host) && all(dst, Side::Here) {
        Some(HostDirection::ToDevice)
    } else if all(src, Side::Here) && all(dst, Side::Host) {
        Some(HostDirection::ToHost)
    } else {
        None
    }
}

/// Whether all of it lies in the memory of this very GPU.
fn inside(src: &[Side], dst: &[Side]) -> bool {
    src.iter().chain(dst).all(|at| *at == Side::Here)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Side::{Beside, Here, Host};

    const MIB: u64 = 1 << 20;

    fn kernel(most_blocks: Option<u32>) -> Route {
        Route::Kernel(Wishes {
            most_blocks,
            ..Wishes::default()
        })
    }

    #[test]
    fn inside_a_gpu_a_copy_has_all_of_it_and_over_a_link_what_fills_the_link() {
        let paths = Some(HostPaths::always(HostPath::Kernel));
        for (src, dst, most_blocks) in [
            (&[Here][..], &[Here][..], None),
            (&[Here, Beside], &[Here], Some(PEER_BLOCKS)),
            (&[Here], &[Beside], Some(PEER_BLOCKS)),
            (&[Host], &[Here], Some(LINK_BLOCKS)),
            (&[Here], &[Here, Host], Some(LINK_BLOCKS)),
            (&[Beside], &[Host], Some(LINK_BLOCKS)),
        ] {
            let route = Route::of(src, dst, [MIB, 1], paths, None);
            assert_eq!(route, kernel(most_blocks), "{src:?} to {dst:?}");
        }
    }

    #[test]
    fn the_measured_path_is_taken_where_it_was_measured() {
        let batch = Some(HostPaths::always(HostPath::Batch));
        let route = |src: &[Side], dst: &[Side]| Route::of(src, dst, [MIB, 1], batch, None);
        assert_eq!(route(&[Host, Host], &[Here]), Route::Batch);
        assert_eq!(route(&[Here], &[Host]), Route::Batch);
        // Nobody has measured these.
        for (src, dst) in [
            (&[Host, Here][..], &[Here][..]),
            (&[Host], &[Here, Host]),
            (&[Here], &[Here, Host]),
            (&[Host], &[Beside]),
            (&[Beside], &[Host]),
            (&[Host], &[Host]),
        ] {
            assert_eq!(route(src, dst), kernel(Some(LINK_BLOCKS)), "{src:?} to {dst:?}");
        }
        assert_eq!(route(&[Here], &[Here]), kernel(None));
        assert_eq!(route(&[Here], &[Beside]), kernel(Some(PEER_BLOCKS)));
        assert_eq!(
            Route::of(&[Host], &[Here], [MIB, 1], None, None),
            kernel(Some(LINK_BLOCKS))
        );
    }

    #[test]
    fn the_bulk_engine_gets_what_lies_on_one_gpu_in_pieces_from_the_measured_size_on() {
        let paths = Some(HostPaths::always(HostPath::Kernel));
        let bulk = |src: &[Side], dst: &[Side]| match Route::of(src, dst, [MIB, 1], paths, Some(4096)) {
            Route::Kernel(wishes) => wishes.bulk,
            Route::Batch => None,
        };
        assert_eq!(bulk(&[Here, Here], &[Here]), Some(4096));
        for (src, dst) in [
            (&[Here][..], &[Host][..]),
            (&[Host], &[Here]),
            (&[Here, Host], &[Here]),
            (&[Here], &[Beside]),
            (&[Beside], &[Here]),
            (&[Here], &[Here, Beside]),
            (&[Beside], &[Beside]),
            (&[Host], &[Host]),
        ] {
            assert_eq!(bulk(src, dst), None, "{src:?} to {dst:?}");
        }
    }

    #[test]
    fn so_many_pieces_that_asking_for_each_takes_long_are_the_kernels() {
        let batch = Some(HostPaths::always(HostPath::Batch));
        let route = |pieces| Route::of(&[Host], &[Here], [1 << 40, pieces], batch, None);
        assert_eq!(route(MOST_PIECES), Route::Batch);
        assert_eq!(route(MOST_PIECES + 1), kernel(Some(LINK_BLOCKS)));
    }
}
