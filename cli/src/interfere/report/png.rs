//! The heat map as a picture of dots, for where SVG is not taken: slides, wikis, chats.

use std::convert::Infallible;
use std::io::Write as _;

use anyhow::Context as _;
use embedded_graphics::mono_font::ascii::{FONT_7X13, FONT_9X15, FONT_10X20};
use embedded_graphics::mono_font::{MonoFont, MonoTextStyle};
use embedded_graphics::pixelcolor::Rgb888;
use embedded_graphics::prelude::*;
use embedded_graphics::primitives::{PrimitiveStyle, Rectangle};
use embedded_graphics::text::{Alignment, Baseline, Text, TextStyleBuilder};

use super::colour::{Colour, of_slowdown};
use crate::interfere::matrix::{Cell, Matrix};
use crate::interfere::plan::{Mode, Plan};

/// Of a cell, in dots.
const CELL: Size = Size::new(132, 52);
/// Letters of a name that fit above a cell and to the left of one.
const LETTERS: usize = 14;
/// Each dot is so many on a side, so that letters stay sharp in print.
const SCALE: usize = 2;

/// Dots that are drawn on.
struct Canvas {
    size: Size,
    dots: Vec<Rgb888>,
}

impl OriginDimensions for Canvas {
    fn size(&self) -> Size {
        self.size
    }
}

impl DrawTarget for Canvas {
    type Color = Rgb888;
    type Error = Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(
        &mut self,
        dots: I,
    ) -> Result<(), Infallible> {
        for Pixel(at, colour) in dots {
            let (Ok(x), Ok(y)) = (u32::try_from(at.x), u32::try_from(at.y)) else {
                continue;
            };
            if x < self.size.width && y < self.size.height {
                // CAST: 32 bits fit.
                self.dots[(y * self.size.width + x) as usize] = colour;
            }
        }
        Ok(())
    }
}

impl Canvas {
    fn new(size: Size) -> Self {
        Self {
            size,
            // CAST: 32 bits fit.
            dots: vec![Rgb888::WHITE; (size.width * size.height) as usize],
        }
    }

    fn rectangle(&mut self, at: Point, size: Size, colour: Colour) {
        let style = PrimitiveStyle::with_fill(of(colour));
        // What is drawn on cannot fail.
        let _ = Rectangle::new(at, size).into_styled(style).draw(self);
    }

    fn text(&mut self, text: &str, at: Point, font: &MonoFont<'_>, to: Alignment, colour: Colour) {
        let style = TextStyleBuilder::new()
            .alignment(to)
            .baseline(Baseline::Middle)
            .build();
        let letters = MonoTextStyle::new(font, of(colour));
        let _ = Text::with_text_style(text, at, letters, style).draw(self);
    }

    /// Row by row: of many jobs the picture is larger than all else of the report.
    fn encoded(&self) -> anyhow::Result<Vec<u8>> {
        let width = self.size.width as usize; // CAST: 32 bits fit.
        let mut file = Vec::new();
        // CAST: a small factor.
        let scale = SCALE as u32;
        let mut encoder =
            png::Encoder::new(&mut file, self.size.width * scale, self.size.height * scale);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().context("a picture")?;
        let mut rows = writer.stream_writer().context("a picture")?;
        let mut bytes = Vec::with_capacity(width * 3 * SCALE);
        for row in self.dots.chunks(width) {
            bytes.clear();
            for dot in row {
                for _ in 0..SCALE {
                    bytes.extend([dot.r(), dot.g(), dot.b()]);
                }
            }
            for _ in 0..SCALE {
                rows.write_all(&bytes).context("a picture")?;
            }
        }
        rows.finish().context("a picture")?;
        writer.finish().context("a picture")?;
        Ok(file)
    }
}

fn of(Colour(red, green, blue): Colour) -> Rgb888 {
    Rgb888::new(red, green, blue)
}

const DARK: Colour = Colour(0x22, 0x22, 0x22);

fn short(name: &str) -> String {
    match name.chars().count() > LETTERS {
        true => format!("{}..", name.chars().take(LETTERS - 2).collect::<String>()),
        false => name.to_owned(),
    }
}

/// Slowdowns of all pairs as PNG: the job at the left, beside the job above.
///
/// # Errors
/// Where it cannot be encoded.
pub fn heat_map(plan: &Plan, matrix: &Matrix, mode: Mode) -> anyhow::Result<Vec<u8>> {
    let names: Vec<&str> = plan.jobs.iter().map(|job| job.name.as_str()).collect();
    // CAST: as many as a plan has jobs.
    let count = names.len() as u32;
    let corner = Point::new(150, 64);
    let width = (150 + CELL.width * count + 16).max(520);
    let mut canvas = Canvas::new(Size::new(width, 64 + CELL.height * count + 70));
    let title = format!("Slowdown of each job beside each other, mode {mode}");
    canvas.text(
        &title,
        Point::new(10, 18),
        &FONT_9X15,
        Alignment::Left,
        DARK,
    );
    // CAST: places within the picture.
    let place = |row: usize, column: usize| {
        corner + CELL.component_mul(Size::new(column as u32, row as u32))
    };
    let half = CELL / 2;
    for (at, name) in names.iter().enumerate() {
        let above = place(0, at) + Size::new(half.width, 0) - Point::new(0, 12);
        canvas.text(&short(name), above, &FONT_9X15, Alignment::Center, DARK);
        let left = place(at, 0) + Size::new(0, half.height) - Point::new(10, 0);
        canvas.text(&short(name), left, &FONT_9X15, Alignment::Right, DARK);
        for (column, beside) in names.iter().enumerate() {
            cell(
                &mut canvas,
                place(at, column),
                matrix.pair(mode, name, beside),
            );
        }
    }
    let mut at = corner + Size::new(0, CELL.height * count + 14);
    for value in [1.0, 1.25, 1.5, 2.0, 2.5, 3.0] {
        let colour = of_slowdown(value);
        let size = Size::new(58, 20);
        canvas.rectangle(at, size, colour);
        let text = if colour.light() {
            DARK
        } else {
            Colour(255, 255, 255)
        };
        canvas.text(
            &format!("{value}"),
            at + size / 2,
            &FONT_7X13,
            Alignment::Center,
            text,
        );
        at += Point::new(58, 0);
    }
    let below = Point::new(corner.x, at.y + 34);
    canvas.text(
        "1: as fast as in its solo runs",
        below,
        &FONT_7X13,
        Alignment::Left,
        DARK,
    );
    canvas.encoded()
}

fn cell(canvas: &mut Canvas, at: Point, cell: Option<&Cell>) {
    let estimate = cell.and_then(|cell| cell.estimate);
    let colour = estimate.map_or(Colour(245, 245, 245), |one| of_slowdown(one.value));
    canvas.rectangle(at, CELL - Size::new(2, 2), colour);
    let text = if colour.light() {
        DARK
    } else {
        Colour(255, 255, 255)
    };
    let middle = at + CELL / 2;
    match estimate {
        Some(one) => {
            let value = format!("{:.2}", one.value);
            canvas.text(
                &value,
                middle - Point::new(0, 9),
                &FONT_10X20,
                Alignment::Center,
                text,
            );
            let interval = format!("{:.2} to {:.2}", one.low, one.high);
            canvas.text(
                &interval,
                middle + Point::new(0, 13),
                &FONT_7X13,
                Alignment::Center,
                text,
            );
        }
        None => canvas.text("none", middle, &FONT_7X13, Alignment::Center, text),
    }
}
