//! Copies that are compared with what they read: by blocks, by pieces, over every memory, through stages; and that nobody sees a wrong byte otherwise.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_core::block_table::BlockTable;
use pdkv_core::plan::{Plan, Selection};
use pdkv_device::cuda::{Cargo, Courier, DeviceRegion, Holder, HostPath, HostPaths, Staging, try_kernels};
use pdkv_device::kernels::Entry;

use crate::alone::{Alone, loaded};
use crate::caches::layout;
use crate::courier::{At, LEN, NO_BULK, Place, asked, cargo, expected, side_by_side};
use crate::standin::fail;

/// How one cargo ends.
fn end(courier: &mut Courier<()>, cargo: Cargo<()>) -> pdkv_core::Result<()> {
    courier.post(cargo).unwrap();
    let mut landed = Vec::new();
    while courier.is_busy() {
        landed.extend(courier.landed());
    }
    assert_eq!(landed.len(), 1);
    landed.remove(0).outcome
}

#[test]
fn verified_cargo_that_left_a_wrong_byte_fails_and_by_a_batch_it_never_goes() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    for (src, dst) in [
        (At::Here, At::Here),
        (At::Mapped, At::Here),
        (At::Host, At::Here),
        (At::Here, At::Host),
    ] {
        // Where a batch is the way, what is verified takes the kernel all the same.
        let mut courier = Courier::forced(&gpu, HostPaths::always(HostPath::Batch), NO_BULK).unwrap();
        let (from, to) = (Place::new(&alone.driver, src, 0), Place::new(&alone.driver, dst, 0x55));
        let expected = expected(&from, &to);
        let verified = || Cargo {
            verify: true,
            ..cargo(&from, &to, ())
        };
        let (_, batches) = asked(alone.path, || end(&mut courier, verified()).unwrap());
        assert_eq!(batches, 0, "{src:?} to {dst:?}");
        assert!(to.read() == expected, "{src:?} to {dst:?}");
        to.write(&vec![0x55; LEN as usize]);
        fail(alone.path, c"wrong", 1, 1);
        let error = end(&mut courier, verified()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Integrity, "{src:?} to {dst:?}: {error}");
        assert!(error.message().contains("`524288` bytes in `1024` pieces"), "{error}");
        assert!(!courier.is_broken());
        // The next one is none the worse for it.
        end(&mut courier, verified()).unwrap();
    }
}

#[test]
fn a_wrong_byte_is_found_by_its_block_and_without_verification_by_nobody() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    let mut courier = Courier::new(&gpu).unwrap();
    let (from, to) = side_by_side(&alone.driver);
    // Two planes of blocks of 4 KiB fill it.
    let whole = layout(1, 128, true, 512);
    assert_eq!(whole.region_bytes(), [LEN]);
    let [src, dst] = [[3, 9, 5], [7, 2, 4]].map(|ids| BlockTable::from_ids(&ids));
    let plan = Plan::pages(&whole, &src, &whole, &dst, &Selection::all(&whole)).unwrap();
    let pages = |verify| Cargo {
        plan: plan.clone(),
        verify,
        ..cargo(&from, &to, ())
    };
    for verify in [false, true] {
        to.write(&vec![0x55; LEN as usize]);
        fail(alone.path, c"wrong", 1, 1);
        let outcome = end(&mut courier, pages(verify));
        let (source, placed) = (from.read(), to.read());
        let differs = |&(src, dst): &(usize, usize)| {
            let at = |plane: usize, block: usize| plane + block * 4096..plane + (block + 1) * 4096;
            [0, LEN as usize / 2]
                .into_iter()
                .any(|plane| source[at(plane, src)] != placed[at(plane, dst)])
        };
        let wrong: Vec<_> = [(3, 7), (9, 2), (5, 4)].into_iter().filter(differs).collect();
        let [(src, dst)] = wrong[..] else {
            panic!("the stand-in left {wrong:?} wrong");
        };
        if verify {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Integrity);
            let text =
                format!("`1` of `3` blocks do not lie at the destination as they were read: `{dst}` from `{src}`");
            assert_eq!(error.message(), text);
        } else {
            outcome.expect("nobody looked");
        }
    }
}

#[test]
fn what_goes_through_a_stage_is_verified_both_ways() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    let never = AtomicBool::new(false);
    let memory = |fill: u8| {
        let region = DeviceRegion::allocate(&gpu, 1 << 16).unwrap();
        region.write_at(0, &vec![fill; 1 << 16]).unwrap();
        region
    };
    for verify in [false, true] {
        let staging = Staging::new(&gpu, 256 << 10, Duration::from_secs(30), verify).unwrap();
        for unpacks in [false, true] {
            let (from, to) = (memory(3), memory(0x55));
            let mut stage = staging.take(Holder(1), &never).unwrap();
            for (offset, bytes) in [(30_000, 20_000), (7, 10_001)] {
                stage.push(&from, offset, bytes).unwrap();
            }
            if !unpacks {
                fail(alone.path, c"wrong", 1, 1);
            }
            let mut outcome = stage.pack();
            if unpacks {
                outcome.unwrap();
                stage.clear();
                stage.push(&to, 100, 30_001).unwrap();
                fail(alone.path, c"wrong", 1, 1);
                outcome = stage.unpack();
            }
            if verify {
                let error = outcome.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Integrity);
                assert!(error.message().starts_with("`30001` bytes in "), "{error}");
            } else {
                outcome.expect("nobody looked");
            }
        }
    }
}

#[test]
fn every_kernel_is_tried_and_one_that_is_wrong_is_named() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = loaded(&alone.driver, 0);
    let mut all: Vec<_> = Entry::all(9).into_iter().map(Entry::name).collect();
    all.sort();
    for seed in 0..4 {
        assert!(
            try_kernels(&gpu, seed).unwrap().into_iter().eq(all.iter().cloned()),
            "seed {seed}"
        );
    }
    fail(alone.path, c"wrong", 1, 1);
    let error = try_kernels(&gpu, 7).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Integrity);
    // The first that is tried.
    assert_eq!(error.message(), "`pdkv2_copy_tiles_8` left a wrong byte");
}
