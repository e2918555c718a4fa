//! Two hidden layers, their gradient, and the step that follows it: plain matrices.

use crate::cluster::Random;

/// A network of two hidden layers of equal width with one number as its answer. Its parameters are
/// one list: weights into the first layer, input by input, its offsets, then the same for the
/// second layer and for the answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Network {
    inputs: usize,
    width: usize,
    params: Vec<f64>,
}

/// What the layers held while a network answered: its gradient needs it.
#[derive(Clone, Debug, Default)]
pub struct Trail {
    first: Vec<f64>,
    second: Vec<f64>,
}

impl Network {
    /// Number of parameters of such a network.
    #[must_use]
    pub fn size(inputs: usize, width: usize) -> usize {
        (inputs + 1) * width + (width + 1) * width + width + 1
    }

    /// With these parameters; `None` where their number is another.
    #[must_use]
    pub fn new(inputs: usize, width: usize, params: Vec<f64>) -> Option<Self> {
        (params.len() == Self::size(inputs, width)).then_some(Self {
            inputs,
            width,
            params,
        })
    }

    /// Small random weights, by He's rule, so that no layer starts saturated.
    #[must_use]
    pub fn random(inputs: usize, width: usize, random: &mut Random) -> Self {
        let mut params = Vec::with_capacity(Self::size(inputs, width));
        for (from, to) in [(inputs, width), (width, width), (width, 1)] {
            let deviation = (2.0 / from as f64).sqrt();
            params.extend((0..from * to).map(|_| deviation * random.normal()));
            params.extend((0..to).map(|_| 0.0));
        }
        Self {
            inputs,
            width,
            params,
        }
    }

    /// Numbers that it looks at.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Units of each hidden layer.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// All parameters.
    #[must_use]
    pub fn params(&self) -> &[f64] {
        &self.params
    }

    /// To change them.
    pub fn params_mut(&mut self) -> &mut [f64] {
        &mut self.params
    }

    /// Where the second layer and the answer begin in the list of parameters.
    fn parts(&self) -> (usize, usize) {
        let second = (self.inputs + 1) * self.width;
        (second, second + (self.width + 1) * self.width)
    }

    /// The answer to an input.
    #[must_use]
    pub fn answer(&self, input: &[f64]) -> f64 {
        self.trace(input, &mut Trail::default())
    }

    /// The answer; `trail` keeps what [`Self::descend`] needs.
    pub fn trace(&self, input: &[f64], trail: &mut Trail) -> f64 {
        let (second, last) = self.parts();
        layer(&self.params[..second], input, &mut trail.first);
        layer(&self.params[second..last], &trail.first, &mut trail.second);
        let (weights, offset) = self.params[last..].split_at(self.width);
        let products = weights.iter().zip(&trail.second);
        offset[0] + products.map(|(weight, unit)| weight * unit).sum::<f64>()
    }

    /// Adds to `gradient` the derivative of the answer with respect to each parameter, `times` so
    /// much.
    pub fn descend(&self, input: &[f64], trail: &Trail, times: f64, gradient: &mut [f64]) {
        let (second, last) = self.parts();
        let (head, of_answer) = gradient.split_at_mut(last);
        let (of_first, of_second) = head.split_at_mut(second);
        for (slope, unit) in of_answer.iter_mut().zip(&trail.second) {
            *slope += times * unit;
        }
        of_answer[self.width] += times;
        let passes = |unit: f64| f64::from(u8::from(unit > 0.0));
        let weights = &self.params[last..];
        let into_second: Vec<f64> = trail
            .second
            .iter()
            .zip(weights)
            .map(|(unit, weight)| times * weight * passes(*unit))
            .collect();
        layer_slopes(of_second, &trail.first, &into_second);
        let weights = self.params[second..].chunks_exact(self.width);
        let into_first: Vec<f64> = trail
            .first
            .iter()
            .zip(weights)
            .map(|(unit, weights)| {
                let products = weights.iter().zip(&into_second);
                passes(*unit) * products.map(|(weight, slope)| weight * slope).sum::<f64>()
            })
            .collect();
        layer_slopes(of_first, input, &into_first);
    }
}

/// The units of a layer: what is positive of the weighted sum.
fn layer(params: &[f64], input: &[f64], units: &mut Vec<f64>) {
    let width = params.len() / (input.len() + 1);
    let (weights, offsets) = params.split_at(input.len() * width);
    units.clear();
    units.extend_from_slice(offsets);
    for (value, weights) in input.iter().zip(weights.chunks_exact(width)) {
        for (unit, weight) in units.iter_mut().zip(weights) {
            *unit += value * weight;
        }
    }
    for unit in units {
        // A number that is none stays none: the caller has to see it.
        *unit = if *unit < 0.0 { 0.0 } else { *unit };
    }
}

fn layer_slopes(slopes: &mut [f64], input: &[f64], into: &[f64]) {
    let width = into.len();
    let (weights, offsets) = slopes.split_at_mut(input.len() * width);
    for (value, weights) in input.iter().zip(weights.chunks_exact_mut(width)) {
        if *value != 0.0 {
            for (slope, into) in weights.iter_mut().zip(into) {
                *slope += value * into;
            }
        }
    }
    for (slope, into) in offsets.iter_mut().zip(into) {
        *slope += into;
    }
}

/// Adam (Kingma and Ba, ICLR 2015): a step for each parameter by the mean of its gradient over the
/// root of its mean square, both over the last steps.
#[derive(Clone, Debug)]
pub struct Adam {
    rate: f64,
    steps: i32,
    mean: Vec<f64>,
    square: Vec<f64>,
}

impl Adam {
    const MEAN: f64 = 0.9;
    const SQUARE: f64 = 0.999;

    /// For so many parameters, with this length of a step.
    #[must_use]
    pub fn new(params: usize, rate: f64) -> Self {
        Self {
            rate,
            steps: 0,
            mean: vec![0.0; params],
            square: vec![0.0; params],
        }
    }

    /// From now on with this length of a step.
    pub fn set_rate(&mut self, rate: f64) {
        self.rate = rate;
    }

    /// A step against the gradient.
    pub fn step(&mut self, params: &mut [f64], gradient: &[f64]) {
        self.steps = self.steps.saturating_add(1);
        let (mean_part, square_part) = (
            1.0 - Self::MEAN.powi(self.steps),
            1.0 - Self::SQUARE.powi(self.steps),
        );
        let state = self.mean.iter_mut().zip(&mut self.square);
        for ((param, slope), (mean, square)) in params.iter_mut().zip(gradient).zip(state) {
            *mean += (1.0 - Self::MEAN) * (slope - *mean);
            *square += (1.0 - Self::SQUARE) * (slope * slope - *square);
            let root = (*square / square_part).sqrt() + 1e-8;
            *param -= self.rate * (*mean / mean_part) / root;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_is_that_of_finite_differences() {
        let mut random = Random::new(3);
        let (inputs, width) = (5, 7);
        for _ in 0..5 {
            let network = Network::random(inputs, width, &mut random);
            let input: Vec<f64> = (0..inputs).map(|_| random.normal()).collect();
            let mut trail = Trail::default();
            let answer = network.trace(&input, &mut trail);
            assert_eq!(answer, network.answer(&input));
            let mut gradient = vec![0.0; network.params().len()];
            network.descend(&input, &trail, 2.0, &mut gradient);
            for (at, slope) in gradient.iter().enumerate() {
                let moved = |by: f64| {
                    let mut other = network.clone();
                    other.params_mut()[at] += by;
                    other.answer(&input)
                };
                let measured = 2.0 * (moved(1e-6) - moved(-1e-6)) / 2e-6;
                assert!((slope - measured).abs() < 1e-6, "{at}: {slope} {measured}");
            }
        }
    }

    #[test]
    fn steps_fit_a_function_that_is_not_linear() {
        let mut random = Random::new(8);
        let mut network = Network::random(2, 16, &mut random);
        let mut adam = Adam::new(network.params().len(), 5e-3);
        let mut trail = Trail::default();
        let mut last = f64::INFINITY;
        for _ in 0..600 {
            let mut gradient = vec![0.0; network.params().len()];
            let mut loss = 0.0;
            for at in 0..32 {
                let input = [
                    f64::from(at % 4) / 2.0 - 0.75,
                    f64::from(at / 4) / 4.0 - 0.9,
                ];
                let error = network.trace(&input, &mut trail) - input[0] * input[1];
                loss += error * error / 32.0;
                network.descend(&input, &trail, 2.0 * error / 32.0, &mut gradient);
            }
            adam.step(network.params_mut(), &gradient);
            last = loss;
        }
        assert!(last < 1e-3, "{last}");
    }

    #[test]
    fn a_list_of_another_length_is_no_network() {
        assert!(Network::new(2, 3, vec![0.0; Network::size(2, 3)]).is_some());
        assert!(Network::new(2, 3, vec![0.0; Network::size(2, 3) - 1]).is_none());
    }
}
